//! gRPC contracts of Hostler, and the rules that both ends of a lane share.
//!
//! The types of `agent` stop at the session, gRPC and lane files of router and agent; nothing behind
//! those files names them. Those of `fleet` are read wherever a fleet is shown, and are its JSON.

mod json;
pub mod lane;
mod replica;
pub mod wire;

/// Contract between agents and routers.
#[allow(unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod agent {
    /// Version 1; see `agent/v1/agent.proto`.
    pub mod v1 {
        tonic::include_proto!("hostler.agent.v1");
    }
}

/// Contract between operators and routers.
#[allow(unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod fleet {
    /// Version 1; see `fleet/v1/fleet.proto`.
    pub mod v1 {
        tonic::include_proto!("hostler.fleet.v1");
    }
}

/// Contract between applications and routers.
#[allow(unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod inference {
    /// Version 1; see `inference/v1/inference.proto`.
    pub mod v1 {
        tonic::include_proto!("hostler.inference.v1");

        /// Contract with its imports, for reflection: an encoded
        /// `google.protobuf.FileDescriptorSet`.
        pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("inference");
    }
}

/// Contract between joining nodes and routers.
#[allow(unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod join {
    /// Version 1; see `join/v1/join.proto`.
    pub mod v1 {
        tonic::include_proto!("hostler.join.v1");
    }
}

/// Version of the agent contract, raised when an old agent could not work with a new router.
pub const PROTOCOL: u32 = 1;

/// Metadata key of a lane's ticket. It is a binary key, so the value is sent unencoded.
pub const TICKET_KEY: &str = "hostler-ticket-bin";
