//! A file of certificates for clients of a fleet with its own authority: what this host trusts, and
//! that authority.
//!
//! Variables that name such a file replace the host's own, so a file with only the authority would
//! break all other programs of the shell.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hostler_tls::write_private;

/// Variables of OpenSSL and what is built on it (Python's ssl and so httpx and OpenAI's SDK), of
/// requests, and of curl.
pub(crate) const REPLACING_VARIABLES: [&str; 3] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];

/// Variable of Node, which adds the file to its own.
pub(crate) const ADDING_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";

/// Mark before the path of the file with what the host trusts. Readers of certificates skip such a
/// line.
const SOURCE_MARK: &str = "# Hostler has added a fleet's authority to ";

/// Certificate file for clients.
#[derive(Debug)]
pub(crate) struct Bundle {
    pub(crate) file: PathBuf,
    /// Whether the file includes what the host trusts. Otherwise it cannot replace a client's own
    /// certificates.
    pub(crate) has_roots: bool,
}

/// File on this host with the certificates for clients of a fleet elsewhere, which this names.
///
/// The file stays: shells refer to it after a connection has ended, and could reach nobody by TLS
/// without it.
pub(crate) fn bundle_of(fleet: &str) -> anyhow::Result<PathBuf> {
    let folder = hostler_boot::home::state_dir().context("there is no home folder to keep certificates in")?.join("hostler/connect");
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(std::path::absolute(folder)?.join(bundle_name(fleet)))
}

/// File name that differs for each fleet.
fn bundle_name(fleet: &str) -> String {
    format!("{}.pem", fleet.replace('%', "%25").replace('/', "%2F"))
}

/// Writes the file, unless it already has this content.
pub(crate) fn write_bundle(file: PathBuf, authority: &str, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Bundle> {
    let source = find_roots(&file, variable, openssl_probe::probe().cert_file);
    let roots = source.map(|source| {
        let roots = fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
        anyhow::Ok(format!("{SOURCE_MARK}{}\n{}\n", source.display(), roots.trim_end()))
    });
    let roots = roots.transpose()?;
    let has_roots = roots.is_some();
    let bundle = format!("{}{}\n", roots.unwrap_or_default(), authority.trim());
    if fs::read_to_string(&file).is_ok_and(|found| found == bundle) {
        return Ok(Bundle { file, has_roots });
    }
    // Programs may be reading the file, so its content is replaced only if it differs.
    write_private(&file, bundle.as_bytes())?;
    Ok(Bundle { file, has_roots })
}

/// The file with what the host trusts: the one that a variable names, else the system's.
///
/// A shell that has evaluated the lines names the bundle itself. In that case the bundle's own
/// source is used, because the bundle may contain the authority of a former fleet.
fn find_roots(bundle: &Path, variable: impl Fn(&str) -> Option<String>, system: Option<PathBuf>) -> Option<PathBuf> {
    let former = fs::read_to_string(bundle).unwrap_or_default();
    let former = former.lines().next().and_then(|line| line.strip_prefix(SOURCE_MARK)).map(PathBuf::from);
    let named = REPLACING_VARIABLES.iter().filter_map(|name| variable(name).map(PathBuf::from));
    let mut named = named.filter_map(|named| if named == bundle { former.clone() } else { Some(named) });
    named.find(|file| file.is_file() && file != bundle).or(system.filter(|file| file != bundle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fleet_elsewhere_has_its_own_certificate_bundle() {
        assert_eq!(bundle_name("me@login"), "me@login.pem");
        assert_eq!(bundle_name("ssh://me@login:22"), "ssh:%2F%2Fme@login:22.pem");
    }

    #[test]
    fn a_bundle_adds_the_fleets_authority_to_trusted_roots_once() {
        let place = tempfile::tempdir().unwrap();
        let (own, file) = (place.path().join("own.pem"), place.path().join("ca-bundle.pem"));
        fs::write(&own, "SITE\n").unwrap();
        let named = |name: &str| (name == "REQUESTS_CA_BUNDLE").then(|| own.display().to_string());
        let content = || fs::read_to_string(&file).unwrap().lines().skip(1).collect::<Vec<_>>().join(",");
        assert!(write_bundle(file.clone(), "FORMER\n", named).unwrap().has_roots);
        assert_eq!(content(), "SITE,FORMER");
        let evaluated = |_: &str| Some(file.display().to_string());
        assert!(write_bundle(file.clone(), "FLEET\n", evaluated).unwrap().has_roots);
        assert_eq!(content(), "SITE,FLEET");
    }

    #[test]
    fn a_bundle_is_never_its_own_source() {
        let place = tempfile::tempdir().unwrap();
        let [system, file] = ["system.pem", "ca-bundle.pem"].map(|name| place.path().join(name));
        let evaluated = |_: &str| Some(file.display().to_string());
        assert_eq!(find_roots(&file, evaluated, None), None);
        fs::write(&file, "FLEET\n").unwrap();
        assert_eq!(find_roots(&file, evaluated, Some(file.clone())), None);
        assert_eq!(find_roots(&file, evaluated, Some(system.clone())), Some(system));
    }
}
