//! Gathers a report's files, or the reasons why they are missing. A failure never keeps the other
//! files out.

use hostler_agent::AgentConfig;
use hostler_agent::plan::{PreviewRequest, preview};
use hostler_boot::Settings;
use hostler_controller::{ClusterConfig, FleetFolder};
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::{ExplainRequest, ListRequest, LogsRequest, Replica};
use serde_json::{Value, json};

use super::archive::ReportFile;
use super::metrics_page::fetch_metrics;
use crate::admin::{AdminArgs, AdminClient, connect, status_error};
use crate::doctor::{CheckResult, examine_host};
use crate::file_end::read_end;
use crate::host_names::this_host;
use crate::output::describe;
use crate::ps::fleet_json;

/// As many lines and decisions as a router gives.
const LOG_LINES: u32 = 200;

const DECISIONS: u32 = 50;

/// Bytes at the end of a controller's log.
const CONTROLLER_LOG_TAIL: u64 = 1 << 20;

/// Setting with shell lines, which may hold secrets in any form.
const WITHHELD: &str = "cluster.setup";

/// Files of a report, and what could not be gathered.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) files: Vec<ReportFile>,
    pub(super) missing: Vec<String>,
}

impl Gathered {
    fn take(&mut self, name: &str, content: anyhow::Result<String>) {
        match content {
            Ok(content) => self.files.push(ReportFile { name: name.to_owned(), content }),
            Err(error) => self.missing.push(format!("{name}: {}", describe(&error))),
        }
    }
}

/// Queries host, router and fleet.
pub(super) async fn gather(settings: &Settings, admin: &AdminArgs) -> Gathered {
    let mut gathered = Gathered::default();
    gathered.take("settings.txt", Ok(describe_settings(settings)));
    gathered.take("doctor.txt", examine_host(settings, None).await.map(|found| join_lines(found.iter().flat_map(CheckResult::lines))));
    gathered.take("plan.txt", describe_plan(settings).await);
    let mut router_version = String::new();
    match connect(admin).await {
        Ok(mut router) => {
            router_version = gather_router(&mut router, &mut gathered).await;
            gathered.take("metrics.txt", fetch_metrics(admin).await);
        }
        Err(error) => gathered.missing.push(format!("all that the router knows: {}", describe(&error))),
    }
    gather_fleet_folder(settings, &mut gathered);
    gathered.files.insert(0, ReportFile { name: "versions.txt".into(), content: describe_versions(&router_version) });
    gathered
}

/// Gathers nodes, decisions, and the logs of failed engines; returns the router's version.
async fn gather_router(router: &mut AdminClient, gathered: &mut Gathered) -> String {
    let listed = match router.list(ListRequest {}).await {
        Ok(listed) => listed.into_inner(),
        Err(status) => {
            gathered.take("ps.json", Err(status_error(status)));
            return String::new();
        }
    };
    let router_version = listed.router_version.clone();
    let failed = listed.nodes.iter().flat_map(|node| &node.replicas).filter(|replica| has_failed(replica));
    let failed: Vec<String> = failed.map(|replica| replica.id.clone()).collect();
    gathered.take("ps.json", print_json(&fleet_json(listed)));
    let decisions = router.explain(ExplainRequest { id: String::new(), most: DECISIONS }).await.map_err(status_error);
    gathered.take("decisions.json", decisions.and_then(|response| print_json(&json!({ "decisions": response.into_inner().decisions }))));
    for id in failed {
        let request = LogsRequest { replica: id.clone(), lines: LOG_LINES, member: None };
        let log = router.logs(request).await.map_err(status_error).map(|log| join_lines(log.into_inner().lines));
        gathered.take(&format!("logs/{}.log", file_name(&id)), log);
    }
    router_version
}

/// Whether the engine's log may report a failure.
fn has_failed(replica: &Replica) -> bool {
    let state = replica.state();
    state.failure.is_some() || state.restarts > 0 || !matches!(replica.phase(), Phase::Ready | Phase::Sleeping | Phase::Draining)
}

/// Gathers the controller's files of a fleet of batch jobs, if there is one.
fn gather_fleet_folder(settings: &Settings, gathered: &mut Gathered) {
    let folder = settings.section::<ClusterConfig>("cluster").map_err(anyhow::Error::from);
    let folder = match folder.and_then(|config| Ok(FleetFolder::find(&config)?)) {
        Ok(Some(folder)) => folder,
        Ok(None) => return,
        Err(error) => return gathered.missing.push(format!("the fleet's folder: {}", describe(&error))),
    };
    for name in ["fleet.toml", "status.json", "endpoint.json", "controller.log"] {
        let path = folder.path().join(name);
        if path.exists() {
            gathered.take(&format!("fleet/{name}"), read_end(&path, CONTROLLER_LOG_TAIL).map_err(anyhow::Error::from));
        }
    }
}

/// Settings that were given, and where; all others have their defaults.
fn describe_settings(settings: &Settings) -> String {
    let lines = settings.given().map(|(name, value, origin)| {
        let shown = if name == WITHHELD { "[withheld]".to_owned() } else { value.to_string() };
        format!("{name} = {shown}    # {origin}")
    });
    join_lines(lines)
}

async fn describe_plan(settings: &Settings) -> anyhow::Result<String> {
    let config: AgentConfig = settings.section("agent")?;
    let previewed = preview(config, PreviewRequest::default()).await?;
    Ok(join_lines(
        std::iter::once(previewed.plan.page()).chain(previewed.assumptions.into_iter().map(|sentence| format!("note       {sentence}"))),
    ))
}

fn describe_versions(router: &str) -> String {
    let system = rustix::system::uname();
    let [name, release, version] = [system.sysname(), system.release(), system.version()].map(|text| text.to_string_lossy().into_owned());
    let router = if router.is_empty() { "unknown" } else { router };
    let time = humantime::format_rfc3339_seconds(std::time::SystemTime::now());
    let program = env!("CARGO_PKG_VERSION");
    join_lines([
        format!("time     {time}"),
        format!("program  {program}"),
        format!("router   {router}"),
        format!("host     {}", this_host()),
        format!("system   {name} {release} {version}"),
    ])
}

fn print_json(value: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

fn join_lines(lines: impl IntoIterator<Item = String>) -> String {
    lines.into_iter().fold(String::new(), |text, line| text + &line + "\n")
}

/// File name from a name that a node has given itself.
fn file_name(id: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    let name: String = id.chars().map(|letter| if is_plain(letter) { letter } else { '-' }).collect();
    name.trim_start_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use hostler_boot::SettingSources;

    use super::*;
    use crate::settings::all;

    #[test]
    fn settings_show_their_origin_and_withhold_setup_lines() {
        let environment = [("HOSTLER_CLUSTER_SETUP", "export A=1"), ("HOSTLER_AGENT_MODEL", "/models/m")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let settings = Settings::load(&all(), &SettingSources { environment, ..SettingSources::default() }).unwrap();
        let described = describe_settings(&settings);
        let expected = "agent.model = \"/models/m\"    # environment variable HOSTLER_AGENT_MODEL\n\
                        cluster.setup = [withheld]    # environment variable HOSTLER_CLUSTER_SETUP\n";
        assert_eq!(described, expected);
    }

    #[test]
    fn a_nodes_name_cannot_escape_the_archive() {
        for (id, name) in [("n1.12/0", "n1.12-0"), ("../../etc/x", "-..-etc-x"), ("a b\u{1b}/1", "a-b--1")] {
            assert_eq!(file_name(id), name);
        }
    }
}
