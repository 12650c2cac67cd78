//! Compiles the `.proto` files in Rust, so that building needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["agent/v1/agent.proto", "fleet/v1/fleet.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    // Every `bytes` field is a `bytes::Bytes`: a frame's body is a slice of the buffer it was read into.
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
