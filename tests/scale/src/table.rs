//! Printed tables.

use std::io::Write;
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) replicas: u32,
    /// Time from the router's start until all are routable.
    pub(crate) came: Duration,
    /// Cores in use while no request comes.
    pub(crate) rest: f64,
    /// Additional cores in use because of viewers of the page.
    pub(crate) viewed: f64,
    /// Bytes a second from the agents meanwhile, and to them.
    pub(crate) up: f64,
    pub(crate) down: f64,
    /// Seconds of a core per request, with all reports of the agents meanwhile.
    pub(crate) per_request: f64,
    /// Seconds of a core per request, without the cost of the fleet at rest.
    pub(crate) of_requests: f64,
    pub(crate) rate: f64,
    /// Cost of listing all replicas to an operator: seconds of a core, and bytes.
    pub(crate) list_cpu: f64,
    pub(crate) list_bytes: usize,
    pub(crate) resident: u64,
    /// Requests that each replica has answered.
    pub(crate) served: Vec<u64>,
}

/// Results of killing a router that comes back.
#[derive(Debug)]
pub(crate) struct Storm {
    /// Time until the router listens.
    pub(crate) listens: Duration,
    /// Time until all replicas are routable.
    pub(crate) back: Duration,
    /// Seconds of a core that the router has used by then.
    pub(crate) cpu: f64,
    /// Number of times that it was dialled.
    pub(crate) attempts: u64,
}

/// Time within which all replicas are back after a router has been started again.
const BACK: Duration = Duration::from_secs(5);

/// Prints the names of the columns.
pub(crate) fn head() {
    say(
        "replicas  routable   at rest                          viewers  requests                             ps                 memory   requests of a replica",
    );
    say(
        "             after      core    from / to agents         core      µs each   less rest       /s        ms        kB       MiB   least median most",
    );
}

pub(crate) fn show(row: &Row) {
    let mut served = row.served.clone();
    served.sort_unstable();
    let [least, median, most] = [0, served.len() / 2, served.len() - 1].map(|at| served[at]);
    say(&format!(
        "{:>8} {:>7.2} s {:>8.2}% {:>7.1} / {:>5.1} kB/s {:>7.2}% {:>11.0} {:>11.0} {:>8.0} {:>9.1} {:>9.0} {:>9.1} {least:>7} {median:>6} {most:>4}",
        row.replicas,
        row.came.as_secs_f64(),
        100.0 * row.rest,
        row.up / 1e3,
        row.down / 1e3,
        100.0 * row.viewed,
        1e6 * row.per_request,
        1e6 * row.of_requests,
        row.rate,
        1e3 * row.list_cpu,
        row.list_bytes as f64 / 1e3,
        row.resident as f64 / f64::from(1 << 20),
    ));
}

pub(crate) fn storm(storm: &Storm) {
    let Storm { listens, back, cpu, attempts } = storm;
    let word = if *back <= BACK { "met" } else { "missed" };
    say(&format!(
        "\nKilled and started again: it listens after {:.0} ms, all replicas are routable after {:.2} s (bar {} s: {word}), for {:.2} s of a core; dialled {attempts} times.",
        1e3 * listens.as_secs_f64(),
        back.as_secs_f64(),
        BACK.as_secs(),
        cpu
    ));
    say("No request failed.");
}

fn say(line: &str) {
    // A closed output wants no more lines.
    let _ = writeln!(std::io::stdout(), "{line}");
}
