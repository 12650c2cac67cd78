//! `hostler ps`: nodes and replicas in one router's view, as a table or as JSON for scripts.

mod cold_start;
mod fleet_jobs;
mod gpu_total;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use hostler_proto::agent::v1::{Failure, Gpu, Job, Member};
use hostler_proto::fleet::v1::{Cache, FleetEvent, FleetFinding, GoneJob, ListResponse, Node, PastRequest, Replica};
use serde_json::{Value, json};

use self::cold_start::cold_start_line;
use self::fleet_jobs::job_lines;
pub(crate) use self::gpu_total::GpuTotal;
use crate::admin::{AdminArgs, AdminClient, connect, list_fleet};
use crate::fleet_state::describe_entries;
use crate::output::{Side, say, table, time_in_words};

/// Output for a router without agents.
pub(crate) const NO_AGENT: &str = "no agent has attached yet: start `hostler agent --router HOST:PORT` on a node";

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let mut router = connect(&args.admin).await?;
    let listed = list_fleet(&mut router).await?;
    let folder = fleet_jobs::find_folder(&args.admin)?;
    let jobs = folder.as_ref().map(fleet_jobs::read).transpose()?.unwrap_or_default();
    if args.json {
        let mut fleet = fleet_json(listed);
        fleet["jobs"] = json!(jobs);
        say(&serde_json::to_string_pretty(&fleet)?);
    } else {
        finding_lines(&listed.findings).iter().for_each(|line| say(line));
        let shortfalls = folder.as_ref().map(describe_entries).transpose()?.unwrap_or_default();
        // The shortfalls of a fleet of jobs say why no agent has come.
        if !listed.nodes.is_empty() || shortfalls.is_empty() {
            lines(&listed.nodes).iter().for_each(|line| say(line));
        }
        past_failures(&mut router, &listed.nodes).await.iter().for_each(|line| say(line));
        job_lines(&jobs).iter().chain(&shortfalls).for_each(|line| say(line));
        gone_lines(&listed.gone_jobs).iter().for_each(|line| say(line));
    }
    Ok(())
}

/// The fleet for scripts.
pub(crate) fn fleet_json(mut listed: ListResponse) -> Value {
    listed.mark_suspects();
    json!({ "findings": listed.findings, "nodes": listed.nodes, "gone_jobs": listed.gone_jobs })
}

/// Lines of what is wrong about how requests ended lately, and what to do.
pub(crate) fn finding_lines(findings: &[FleetFinding]) -> Vec<String> {
    findings.iter().map(|finding| format!("TROUBLE  {}: {}", finding.evidence, finding.advice)).collect()
}

fn lines(nodes: &[Node]) -> Vec<String> {
    if nodes.is_empty() {
        return vec![NO_AGENT.into()];
    }
    let replicas = || nodes.iter().flat_map(|node| node.replicas.iter().map(move |replica| (node, replica)));
    // A fleet without GPUs has no column of them.
    let gpu = if replicas().any(|(_, replica)| !gpu_cell(replica).is_empty()) { "GPU" } else { "" };
    let job = if nodes.iter().any(|node| node.job.is_some()) { "JOB" } else { "" };
    let mut rows = vec![
        ["REPLICA", "PHASE", "MODEL", gpu, job, "IN FLIGHT", "RUNNING", "WAITING", "KV", "CACHE", "SERVED", "RESTARTS", "ENGINE", ""]
            .map(String::from),
    ];
    for (node, replica) in replicas() {
        let (state, load, cache) = (replica.state(), replica.load(), replica.cache());
        let engine = load.engine.unwrap_or_default();
        rows.push([
            replica.id.clone(),
            replica.phase().as_str().into(),
            models_cell(replica.model_ids()),
            gpu_cell(replica),
            node.job.as_ref().map(job_cell).unwrap_or_default(),
            load.in_flight.to_string(),
            engine.running.to_string(),
            engine.waiting.to_string(),
            format!("{:.0}%", engine.kv_use * 100.0),
            cache_cell(cache),
            load.served.to_string(),
            state.restarts.to_string(),
            replica.engine_words(),
            remark(replica),
        ]);
    }
    let mut lines = table([Side::Left; 14], &rows);
    let lost =
        nodes.iter().filter(|node| !node.attached && node.job.is_none()).map(|node| format!("{}: its agent is not connected", node.name));
    lines.extend(lost);
    lines.extend(cold_start_line(nodes.iter().flat_map(|node| &node.replicas)));
    lines
}

/// What engines died of that serve again, as far as the router remembers it.
async fn past_failures(router: &mut AdminClient, nodes: &[Node]) -> Vec<String> {
    let restarted = |replica: &&Replica| replica.is_ready() && replica.state().restarts > 0;
    if !nodes.iter().flat_map(|node| &node.replicas).any(|replica| restarted(&replica)) {
        return Vec::new();
    }
    // The past is no reason to show nothing of the present.
    let past = router.past(PastRequest { after_event: 0, most: 0 }).await;
    let events = past.map(|past| past.into_inner().events).unwrap_or_default();
    let replicas = nodes.iter().flat_map(|node| &node.replicas).filter(restarted);
    replicas.filter_map(|replica| last_failure(&replica.id, &events, SystemTime::now())).collect()
}

/// The last failure of this replica.
fn last_failure(replica: &str, events: &[FleetEvent], now: SystemTime) -> Option<String> {
    let failed = events.iter().filter(|event| event.grave && event.subject == replica).max_by_key(|event| event.number)?;
    let ago = now.duration_since(UNIX_EPOCH + Duration::from_millis(failed.at_ms)).unwrap_or_default();
    Some(format!("{} ago: {}", time_in_words(ago.as_secs()), failed.words))
}

/// Jobs whose agent is gone, and what became of them.
fn gone_lines(gone_jobs: &[GoneJob]) -> Vec<String> {
    let line = |gone: &GoneJob| {
        let GoneJob { node, gone_ms_ago, reason, .. } = gone;
        let (job, ago) = (gone.job(), time_in_words(gone_ms_ago / 1000));
        format!("{node}: job {} run {} gone {ago} ago: {}", job.id, job.run, one_line(reason))
    };
    gone_jobs.iter().map(line).collect()
}

/// `12.head ends in 1h 12m`, with the run if that is not the first.
fn job_cell(job: &Job) -> String {
    let end = job.ends_in_ms.map(|left| format!(" ends in {}", time_in_words(left / 1000))).unwrap_or_default();
    run_words(job) + &end
}

/// The job, with the run if that is not the first.
pub(crate) fn run_words(job: &Job) -> String {
    if job.run > 1 { format!("{} run {}", job.id, job.run) } else { job.id.clone() }
}

/// Blocks that are known to be cached: on the GPU, in the host's memory and in files.
fn cache_cell(cache: &Cache) -> String {
    if !cache.exact {
        return "text".into();
    }
    let of = |blocks: u64, place: &str| if blocks > 0 { format!(" + {blocks} {place}") } else { String::new() };
    format!("exact {}{}{}", cache.blocks, of(cache.host_blocks, "on host"), of(cache.file_blocks, "in files"))
}

/// Remark for facts that no column shows.
///
/// For a serving replica: why its cache is not known exactly, and whether there is advice. For
/// others: how far the start has come, or what is wrong and what to do.
pub(crate) fn remark(replica: &Replica) -> String {
    let (state, cache) = (replica.state(), replica.cache());
    if !replica.is_ready() {
        return match (&state.progress, &state.failure) {
            // An engine that cannot start spends most of its time starting.
            (Some(progress), Some(failure)) if replica.is_coming() => {
                format!("{}; last time: {}", progress.sentence(), failure_text(failure))
            }
            (Some(progress), None) if replica.is_coming() => progress.sentence(),
            (_, Some(failure)) if !replica.is_coming() => failure_text(failure),
            _ => replica.first_reason().to_owned(),
        };
    }
    let mut parts = Vec::new();
    if !state.members.is_empty() {
        parts.push(members_text(&state.members));
    }
    if state.is_standby {
        parts.push("standby".to_owned());
    }
    let reason = if cache.distrusted { "its reports of cached blocks contradict themselves" } else { &cache.reason };
    if !reason.is_empty() {
        // For a cache that is known exactly, the reason says which requests are still placed by
        // text.
        parts.push(if cache.exact { one_line(reason) } else { format!("placed by text: {}", one_line(reason)) });
    }
    if !state.findings.is_empty() {
        parts.push(format!("advice: {}, see hostler advise", state.findings.len()));
    }
    parts.join("; ")
}

/// The other nodes of a replica, and what is wrong with one of them.
fn members_text(members: &[Member]) -> String {
    let hosts: Vec<&str> = members.iter().map(|member| member.host.as_str()).collect();
    let trouble = members.iter().find(|member| !member.is_heard);
    let trouble = trouble.map(|member| format!(" ({}: {})", member.host, member.state)).unwrap_or_default();
    format!("with {}{trouble}", hosts.join(", "))
}

/// First name of a replica's models, and how many more there are: adapters can be dozens. `--json`
/// has all of them.
fn models_cell<'a>(mut models: impl Iterator<Item = &'a str>) -> String {
    let first = models.next().unwrap_or_default();
    match models.count() {
        0 => first.to_owned(),
        more => format!("{first} +{more}"),
    }
}

fn failure_text(failure: &Failure) -> String {
    let sentence = [failure.cause.as_str(), &failure.remedy];
    sentence.map(one_line).into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

fn one_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// GPUs of a replica and their readings: total memory and power, mean utilisation, and highest
/// temperature.
fn gpu_cell(replica: &Replica) -> String {
    let state = replica.state();
    let Some(total) = GpuTotal::of(state.gpus.iter()) else { return short_name(&state.gpu).to_owned() };
    let name = short_name(&total.name);
    let mut parts = vec![numbers(state.gpus.iter())];
    parts.push(if total.count == 1 { name.to_owned() } else { format!("{}×{name}", total.count) });
    parts.extend(total.memory_used.map(|used| format!("{}/{} GiB", gib(used), gib(total.memory))));
    parts.extend(total.utilisation.map(|percent| format!("{percent}%")));
    parts.extend(total.watts.map(|watts| format!("{watts:.0} W")));
    parts.extend(total.celsius.map(|celsius| format!("{celsius} °C")));
    parts.join(" ")
}

/// `3`, `0-3` for neighbours, `0,2` for others.
fn numbers<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    let numbers: Vec<u32> = gpus.map(|gpu| gpu.index).collect();
    match &numbers[..] {
        [first, .., last] if numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]) => format!("{first}-{last}"),
        _ => numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

/// A product's name without its maker's.
pub(crate) fn short_name(name: &str) -> &str {
    name.strip_prefix("NVIDIA ").unwrap_or(name)
}

/// Rounds to the nearest GiB.
pub(crate) fn gib(bytes: u64) -> u64 {
    (bytes + (1 << 29)) >> 30
}

#[cfg(test)]
pub(crate) mod tests;
