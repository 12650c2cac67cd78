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
    let mut missing = Vec::new();
    if mistakes.is_empty() {
        let settings = Settings::load(&settings::all(), &SettingSources { file: Some(file), ..SettingSources::default() })?;
        let log: LogConfig = settings.section("log")?;
        mistakes.extend(telemetry::init(&log).err().map(|error| error.to_string()));
        missing = missing_files(&settings);
    }
    match &mistakes[..] {
        [] => {
            missing.iter().for_each(|words| complain(words));
            say(&verdict(file, missing.len()));
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

fn verdict(file: &Path, missing: usize) -> String {
    let file = file.display();
    match missing {
        0 => format!("{file} is sound"),
        1 => format!("{file} is sound; a file that it names is not on this host, without which its role does not start here"),
        count => format!("{file} is sound; {count} files that it names are not on this host, without which their roles do not start here"),
    }
}

/// Files that the settings name and this host lacks, by line. That is no mistake: one file may
/// serve several hosts, each of which has those of its role.
fn missing_files(settings: &Settings) -> Vec<String> {
    let given = settings.given().filter(|(name, ..)| NEEDED_FILES.contains(&name.as_str()));
    let named = given.filter_map(|(name, value, origin)| Some((name, value.as_str().filter(|path| !path.is_empty())?, origin)));
    let mut missing: Vec<_> = named.filter(|(_, path, _)| !Path::new(path).exists()).collect();
    missing.sort_by_key(|(name, ..)| settings.line(name));
    missing.into_iter().map(|(name, path, origin)| format!("{origin}: {name}: {path} is not there, on this host")).collect()
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
        let settings = Settings::load(&settings::all(), &SettingSources { file: Some(&path), ..SettingSources::default() }).unwrap();
        assert_eq!(missing_files(&settings), [format!("{here}:2: router.tls_cert: /nowhere/edge.pem is not there, on this host")]);
        assert!(check(Some(&path)).is_ok() && verdict(&path, 1).contains("a file that it names is not on this host"));
    }
}
