//! Clusters known to `hostler init --site`: the files of `deploy/sites`, which are part of the
//! program.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use hostler_scheduler::{NoScheduler, Scheduler};

use crate::output::{Side, table};
use crate::settings::check_site;

const SITES: [(&str, &str); 6] = [
    ("generic-pbs", include_str!("../../../deploy/sites/generic-pbs.toml")),
    ("generic-slurm", include_str!("../../../deploy/sites/generic-slurm.toml")),
    ("polaris", include_str!("../../../deploy/sites/polaris.toml")),
    ("aurora", include_str!("../../../deploy/sites/aurora.toml")),
    ("sophia", include_str!("../../../deploy/sites/sophia.toml")),
    ("gadi", include_str!("../../../deploy/sites/gadi.toml")),
];

/// Settings of a site, as a part of a configuration file.
pub(super) fn read(site: &str) -> anyhow::Result<String> {
    if let Some((_, text)) = SITES.iter().find(|(name, _)| *name == site) {
        return Ok((*text).to_owned());
    }
    let path = Path::new(site);
    if !path.exists() {
        let names: Vec<&str> = SITES.iter().map(|(name, _)| *name).collect();
        bail!("there is no site and no file {site:?}: the sites are {}; name one, or a file with a [cluster] section", names.join(", "));
    }
    check_site(path)?;
    fs::read_to_string(path).with_context(|| format!("cannot read {site}"))
}

/// Settings for the only scheduler whose commands this host has.
pub(super) fn read_of_host() -> Result<String, NoScheduler> {
    let site = match Scheduler::find()? {
        Scheduler::Pbs => "generic-pbs",
        Scheduler::Slurm => "generic-slurm",
    };
    Ok(read(site).expect("these sites are part of the program"))
}

/// Each site with its first sentence.
pub(super) fn lines() -> Vec<String> {
    let row = |(name, text): &(&str, &str)| {
        let sentence = text.trim_start_matches("# ").lines().next().unwrap_or_default();
        [(*name).to_owned(), sentence.split(". ").next().unwrap_or_default().trim_end_matches('.').to_owned()]
    };
    table([Side::Left; 2], &SITES.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use hostler_controller::{ControllerPlace, FleetFolder, JobProgram, build_controller_submission, build_submission};
    use hostler_scheduler::Submission;

    use super::*;

    #[test]
    fn every_site_file_is_valid_and_names_its_scheduler() {
        for (name, text) in SITES {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), text).unwrap();
            check_site(file.path()).unwrap_or_else(|error| panic!("{name}: {error:#}"));
            let config = crate::settings::cluster_config(Some(file.path())).unwrap();
            config.scheduler.parse::<Scheduler>().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(text.contains("router_host") && text.lines().all(|line| line.len() <= 150), "{name}");
        }
        assert_eq!(lines().len(), SITES.len());
    }

    /// The files are what a site's support can show: `deploy/sites/NAME.snap`.
    #[test]
    fn site_submissions_match_their_snapshots() {
        for (name, text) in SITES {
            let place = tempfile::tempdir().unwrap();
            let file = place.path().join("hostler.toml");
            fs::write(&file, text).unwrap();
            let config = crate::settings::cluster_config(Some(&file)).unwrap();
            let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
            let entry = "name = 'qwen3-8b'\nmodel = 'Qwen/Qwen3-8B'\nnodes = 2\nwalltime = '2h'";
            let program = JobProgram { program: Path::new("/home/anna/.local/bin/hostler"), config: Some(&file) };
            let show = |submission: &Submission| {
                let rendered = config.scheduler.parse::<Scheduler>().unwrap().render(submission);
                let tag = folder.job_name("").split_off("hostler--".len());
                let shown = rendered.to_string().replace(&tag, "ab12").replace(&place.path().display().to_string(), "/home/anna");
                let digest = rendered.script_file.as_deref().and_then(Path::file_stem).and_then(|stem| stem.to_str());
                digest.map_or(shown.clone(), |digest| shown.replace(digest, "DIGEST"))
            };
            let mut shown = show(&build_submission(&toml::from_str(entry).unwrap(), 2, &config, &folder, &program));
            if config.controller == ControllerPlace::Job {
                shown = format!("{}\n{shown}", show(&build_controller_submission(&config, &folder, &program, None)));
            }
            insta::with_settings!({ snapshot_path => "../../../deploy/sites", prepend_module_to_snapshot => false, omit_expression => true }, {
                insta::assert_snapshot!(name, shown);
            });
        }
    }

    #[test]
    fn a_users_own_file_may_be_a_site() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "[cluster]\nscheduler = \"pbs\"\n\n[agent]\nengine = \"simulated\"\n").unwrap();
        assert!(read(path).unwrap().contains("simulated"));
        fs::write(path, "[cluster]\nqueu = \"x\"\n").unwrap();
        assert!(read(path).unwrap_err().to_string().contains("did you mean `cluster.queue`?"));
        fs::write(path, "[router]\nlisten = \"0.0.0.0:80\"\n").unwrap();
        assert!(read(path).unwrap_err().to_string().contains("unknown key `router"));
        assert!(read("nowhere").unwrap_err().to_string().contains("polaris"));
    }
}
