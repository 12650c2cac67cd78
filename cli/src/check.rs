//! `hostler check`: reads a configuration file as every role would, and says all that is wrong.

use std::path::Path;

use anyhow::{Context, bail};
use hostler_boot::telemetry::{self, LogConfig};
use hostler_boot::{Mistakes, SettingSources, Settings};

use crate::output::{complain, say};
use crate::settings;

/// Settings that name a file or a folder which must be there before a role starts.
const NEEDED_FILES: [&str; 8] = [
    "router.keys_file",
    "router.tls_cert",
    "router.tls_key",
    "router.tls_client_ca",
    "router.tls_dir",
    "router.secret_file",
    "agent.attach_key_file",
    "agent.join_token_file",
];

pub(crate) fn check(file: Option<&Path>) -> anyhow::Result<()> {
    let file = file.context("there is no configuration file of yours: name one, as in `hostler check FILE`")?;
    let Mistakes { first, more } = Settings::mistakes(&settings::all(), file)?;
    let mut mistakes: Vec<String> = first.iter().map(ToString::to_string).collect();
    if mistakes.is_empty() {
        let settings = Settings::load(&settings::all(), &SettingSources { file: Some(file), ..SettingSources::default() })?;
        let log: LogConfig = settings.section("log")?;
        mistakes.extend(missing_files(&settings));
        mistakes.extend(telemetry::init(&log).err().map(|error| error.to_string()));
    }
    match &mistakes[..] {
        [] => {
            say(&format!("{} is sound", file.display()));
            Ok(())
        }
        [only] => bail!("{only}"),
        several => {
            several.iter().for_each(|mistake| complain(mistake));
            if more > 0 {
                complain(&format!("and {more} more"));
            }
            bail!("{} mistakes are in {}", several.len() + more, file.display())
        }
    }
}

/// Files that the settings name and this host lacks. A role that needs one does not start.
fn missing_files(settings: &Settings) -> Vec<String> {
    let given = settings.given().filter(|(name, ..)| NEEDED_FILES.contains(&name.as_str()));
    let named = given.filter_map(|(name, value, origin)| Some((name, value.as_str().filter(|path| !path.is_empty())?, origin)));
    let missing = named.filter(|(_, path, _)| !Path::new(path).exists());
    missing.map(|(name, path, origin)| format!("{origin}: {name}: {path} is not there, on this host")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_settings_need_is_missed_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hostler.toml");
        let here = path.display();
        std::fs::write(&path, format!("[router]\ntls_cert = \"/nowhere/edge.pem\"\ntls_key = \"{here}\"\nkeys_file = \"\"\n")).unwrap();
        let error = check(Some(&path)).unwrap_err().to_string();
        assert_eq!(error, format!("{here}:2: router.tls_cert: /nowhere/edge.pem is not there, on this host"));
    }
}
