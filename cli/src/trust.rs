//! A file of certificates for clients of a fleet that shows one of its own authority: what this host trusts, and that authority. The variables by
//! which clients are told of a file replace the host's own, so a file with the authority alone would break all other programs of the shell.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::NamedTempFile;

/// OpenSSL and what is built on it (Python's ssl and so httpx and OpenAI's SDK), requests, and curl.
pub(crate) const REPLACING_VARIABLES: [&str; 3] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];

/// Node adds this file to its own.
pub(crate) const ADDING_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";

/// Writes the file, unless it is there already. What a variable names counts as what the host trusts.
pub(crate) fn write_bundle(file: &Path, authority: &str, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    let named = REPLACING_VARIABLES.iter().find_map(|name| variable(name)).map(PathBuf::from);
    let trusted = named.filter(|file| file.is_file()).or_else(|| openssl_probe::probe().cert_file);
    let trusted = trusted.map(|file| fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display())));
    let bundle = join(&trusted.transpose()?.unwrap_or_default(), authority);
    if fs::read_to_string(file).is_ok_and(|found| found == bundle) {
        return Ok(());
    }
    // Programs may be reading it.
    let written = (|| {
        let mut new = NamedTempFile::new_in(file.parent().unwrap_or(Path::new("/")))?;
        new.write_all(bundle.as_bytes())?;
        new.persist(file).map_err(|error| error.error)
    })();
    written.with_context(|| format!("cannot write {}", file.display())).map(drop)
}

/// Both, each once: the file may be one that was written here before.
fn join(trusted: &str, authority: &str) -> String {
    let authority = authority.trim();
    if trusted.contains(authority) { trusted.to_owned() } else { format!("{}\n{authority}\n", trusted.trim_end()).trim_start().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_has_what_is_trusted_and_the_authority_once() {
        let place = tempfile::tempdir().unwrap();
        let (own, bundle) = (place.path().join("own.pem"), place.path().join("ca-bundle.pem"));
        fs::write(&own, "SITE\n").unwrap();
        let variable = |name: &str| (name == "REQUESTS_CA_BUNDLE").then(|| own.display().to_string());
        write_bundle(&bundle, "FLEET\n", variable).unwrap();
        assert_eq!(fs::read_to_string(&bundle).unwrap(), "SITE\nFLEET\n");
        let evaluated = |_: &str| Some(bundle.display().to_string());
        write_bundle(&bundle, "FLEET\n", evaluated).unwrap();
        assert_eq!(fs::read_to_string(&bundle).unwrap(), "SITE\nFLEET\n");
        assert_eq!(join("", "FLEET\n"), "FLEET\n");
    }
}
