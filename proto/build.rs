//! Compiles the `.proto` files in Rust, so that building needs no `protoc`. The messages of a fleet
//! are JSON as well: what `hostler ps` and `explain` print with `--json`, and what the router's
//! page reads.

/// Messages that are written as JSON, by their fields' names.
const JSON_MESSAGES: [&str; 28] = [
    "agent.v1.EngineLoad",
    "agent.v1.Failure",
    "agent.v1.Finding",
    "agent.v1.Gpu",
    "agent.v1.GpuReading",
    "agent.v1.Job",
    "agent.v1.Launch",
    "agent.v1.Load",
    "agent.v1.Member",
    "agent.v1.Progress",
    "agent.v1.ReplicaState",
    "agent.v1.Start",
    "agent.v1.StartStage",
    "fleet.v1.Cache",
    "fleet.v1.Decision",
    "fleet.v1.FirstTokens",
    "fleet.v1.FleetEvent",
    "fleet.v1.FleetFinding",
    "fleet.v1.GoneJob",
    "fleet.v1.ModelDemand",
    "fleet.v1.Node",
    "fleet.v1.Rates",
    "fleet.v1.RefusedRequest",
    "fleet.v1.Replica",
    "fleet.v1.RequestCounts",
    "fleet.v1.Scored",
    "fleet.v1.TenantUse",
    "fleet.v1.Terms",
];

/// Messages whose fields stand beside those of the message that has them.
const JSON_FLATTENED: [&str; 4] = ["Gpu.reading", "Load.engine", "Replica.load", "Replica.state"];

/// Fields that JSON leaves out: what only routers and agents need of each other, and what another
/// field says as well.
const JSON_SKIPPED: [&str; 8] = [
    "GpuReading.uuid",
    "Load.context_tokens_yours",
    "Load.in_flight_yours",
    "Load.pending_tokens_yours",
    "ModelDemand.alias_of",
    "Replica.suspect",
    "ReplicaState.cache",
    "ReplicaState.prompt_files",
];

/// Fields with another name or another form in JSON: the field, its name, and the function of
/// `src/json.rs` that writes it.
const JSON_FORMS: [(&str, &str, &str); 15] = [
    ("Decision.nominal", "nominal", "whole"),
    ("GoneJob.gone_ms_ago", "gone_seconds_ago", "seconds"),
    ("GoneJob.job", "job", "whole"),
    ("Job.ends_in_ms", "ends_in_seconds", "optional_seconds"),
    ("Job.leaves_in_ms", "leaves_in_seconds", "optional_seconds"),
    ("Launch.kv_tokens", "kv_tokens", "known"),
    ("Launch.max_model_len", "max_model_len", "known"),
    ("Progress.seconds_left", "seconds_left", "known"),
    ("Replica.cache", "cache", "whole"),
    ("Replica.rates", "rates", "whole"),
    ("ReplicaState.models", "models", "model_ids"),
    ("ReplicaState.phase", "phase", "phase"),
    ("ReplicaState.returns_in_seconds", "returns_in_seconds", "known"),
    ("Scored.rates", "rates", "whole"),
    ("Scored.terms", "terms", "whole"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["agent/v1/agent.proto", "fleet/v1/fleet.proto", "inference/v1/inference.proto", "join/v1/join.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    // Clients get this contract by reflection.
    let inference =
        protox::Compiler::new(["."])?.include_imports(true).open_file("inference/v1/inference.proto")?.encode_file_descriptor_set();
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("inference.bin"), inference)?;
    let descriptors = protox::compile(files, ["."])?;
    // Every `bytes` field is a `bytes::Bytes`: a frame's body is a slice of the buffer it was read
    // into.
    let mut builder = tonic_prost_build::configure().bytes(".");
    for message in JSON_MESSAGES {
        builder = builder.message_attribute(message, "#[derive(serde::Serialize)]");
    }
    for field in JSON_FLATTENED {
        builder = builder.field_attribute(field, "#[serde(flatten, serialize_with = \"crate::json::whole\")]");
    }
    for field in JSON_SKIPPED {
        builder = builder.field_attribute(field, "#[serde(skip)]");
    }
    for (field, name, form) in JSON_FORMS {
        builder = builder.field_attribute(field, format!("#[serde(rename = \"{name}\", serialize_with = \"crate::json::{form}\")]"));
    }
    builder.field_attribute("Node.name", "#[serde(rename = \"node\")]").compile_fds(descriptors)?;
    Ok(())
}
