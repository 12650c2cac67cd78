//! Compiles the `.proto` files in Rust, so that building needs no `protoc`.

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
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
