//! Translates the document of the edge's API, which people write in YAML, into the JSON that the router serves.

use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let source = "../docs/openapi.yaml";
    println!("cargo:rerun-if-changed={source}");
    let document: serde_json::Value = serde_saphyr::from_str(&fs::read_to_string(source)?)?;
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("openapi.json"), document.to_string())?;
    Ok(())
}
