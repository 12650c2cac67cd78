//! A replica on the whole screen: its state and figures, its GPUs, why the last requests went
//! there, and the end of its engine's log.

use std::time::{Duration, UNIX_EPOCH};

use hostler_proto::agent::v1::Gpu;
use hostler_proto::fleet::v1::{Decision, Node, Replica};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;

use super::figures::{UNKNOWN, clock, gpu_figures, hit_share, percent, rate, seconds};
use super::header::first_token_words;
use super::lists::cached_share;
use super::palette::Palette;
use super::{TALL, height_of, line, span, write_all};
use crate::output::time_in_words;
use crate::output::{Side, table};
use crate::ps::{GpuTotal, remark};
use crate::top::model::{ReplicaDetail, TopModel};
use crate::top::text::{cut, printable, width, wrap};

/// Requests shown on a small screen, and on a tall one.
const REQUESTS: (usize, usize) = (4, 10);

pub(super) fn draw_detail(buffer: &mut Buffer, area: Rect, model: &TopModel, (shown, palette): (&ReplicaDetail, Palette)) {
    let mut lines = Vec::new();
    match model.picture().and_then(|fleet| fleet.find_replica(&shown.replica)) {
        Some((node, replica)) => {
            lines.extend(state_lines(node, replica, area, palette));
            lines.extend(figure_lines(&figure_words(model, replica), area.width.into()).iter().map(|words| line(words)));
            lines.extend(replica.state().gpus.iter().map(gpu_line));
            let findings =
                replica.state().findings.iter().map(|finding| line(&format!("advice: {}; {}", finding.evidence, finding.advice)));
            lines.extend(findings.take(2));
        }
        None => lines.push(Line::from(span(&format!("{} is gone from the router's list", shown.replica), palette.alarm()))),
    }
    let heading = |words: &str| Line::styled(format!("{words:width$}", width = area.width.into()), palette.heading(false));
    let most = if area.height >= TALL { REQUESTS.1 } else { REQUESTS.0 };
    lines.push(heading("WHY THE LAST REQUESTS CAME HERE (UTC)"));
    lines.extend(match &shown.decisions {
        Ok(decisions) => request_lines(decisions, &shown.replica, most),
        Err(error) => vec![line(error)],
    });
    lines.push(heading("THE END OF ITS LOG"));
    let room = usize::from(area.height).saturating_sub(lines.len());
    lines.extend(match &shown.log {
        Ok(log) => {
            let shown = log.iter().skip(log.len().saturating_sub(room));
            shown.map(|words| Line::from(cut(&printable(words), area.width.into()))).collect()
        }
        Err(error) => vec![line(error)],
    });
    write_all(buffer, Rect { height: height_of(lines.len()).min(area.height), ..area }, &lines);
}

/// State of the replica, the reason for it, and its node.
fn state_lines(node: &Node, replica: &Replica, area: Rect, palette: Palette) -> Vec<Line<'static>> {
    let (state, phase) = (replica.state(), replica.phase());
    let engine =
        Some(replica.engine_words()).filter(|words| !words.is_empty()).map(|words| format!("  engine {words}")).unwrap_or_default();
    let process = if state.engine_pid == 0 { String::new() } else { format!("  process {}", state.engine_pid) };
    let models: Vec<&str> = replica.model_ids().collect();
    let mut lines = vec![Line::from(vec![
        span(&replica.id, palette.strong()),
        span("  ", palette.plain()),
        span(phase.as_str(), palette.phase(phase)),
        span(&format!("  {}{engine}{process}  {} restarts", models.join(", "), state.restarts), palette.plain()),
    ])];
    let remark = remark(replica);
    lines.extend(wrap(&printable(&remark), area.width.into()).iter().filter(|words| !words.is_empty()).take(3).map(|words| line(words)));
    let job = node.job.as_ref().map(|job| {
        let end = job.ends_in_ms.map(|left| format!(", ends in {}", time_in_words(left / 1000))).unwrap_or_default();
        format!("  job {}, run {}{end}", job.id, job.run)
    });
    let attached = if node.attached { "attached" } else { "lost" };
    lines.push(line(&format!("node {}, agent {} {attached}{}", node.name, node.agent_version, job.unwrap_or_default())));
    lines
}

fn figure_words(model: &TopModel, replica: &Replica) -> Vec<String> {
    let mut words = vec![format!("{} in flight", replica.load().in_flight)];
    if let Some(engine) = replica.engine() {
        words.extend([format!("{} running", engine.running), format!("{} waiting", engine.waiting)]);
        words.push(format!("KV {}", percent(engine.kv_use)));
        let tokens = model.tokens_per_second(&replica.id).map_or_else(|| UNKNOWN.to_owned(), rate);
        words.push(format!("{tokens} tokens/s"));
        words.extend(cached_share(replica).map(|cached| format!("cached {}", percent(cached))));
        words.extend(hit_share(engine).map(|hits| format!("prefix hits {}", percent(hits))));
        words.extend((engine.preemptions > 0).then(|| format!("{} preempted", engine.preemptions)));
    }
    words.extend(replica.first_tokens.map(first_token_words));
    words
}

/// Fills each line with as many words as it holds.
fn figure_lines(words: &[String], columns: usize) -> Vec<String> {
    const GAP: &str = "  ";
    let mut lines = vec![String::new()];
    for word in words {
        let last = lines.last_mut().expect("there is a line");
        if last.is_empty() {
            last.push_str(word);
        } else if width(last) + GAP.len() + width(word) <= columns {
            last.push_str(GAP);
            last.push_str(word);
        } else {
            lines.push(word.clone());
        }
    }
    lines
}

fn gpu_line(gpu: &Gpu) -> Line<'static> {
    let total = GpuTotal::of(std::iter::once(gpu)).expect("there is one");
    let figures = gpu_figures(&total).into_iter().filter(|figure| !figure.is_empty()).collect::<Vec<_>>().join(" ");
    let reading = gpu.reading();
    let throttled = if reading.throttled.is_empty() { String::new() } else { format!("  held down: {}", reading.throttled.join(", ")) };
    let fault = if reading.last_xid == 0 { String::new() } else { format!("  last XID {}", reading.last_xid) };
    line(&format!("GPU {} {}  {figures}{throttled}{fault}", gpu.index, gpu.name))
}

/// The router's last requests that went to this replica, and why.
fn request_lines(decisions: &[Decision], replica: &str, most: usize) -> Vec<Line<'static>> {
    let here = decisions.iter().filter(|decision| chosen(decision).is_some_and(|chosen| chosen.replica == replica));
    let row = |decision: &Decision| {
        let matched = chosen(decision).map_or(0, |chosen| chosen.matched);
        [
            clock(UNIX_EPOCH + Duration::from_millis(decision.at_ms)),
            decision.id.clone(),
            format!("{matched}/{} cached", decision.tokens),
            reason_words(decision),
            decision.first_token.map(|time| format!("first {}", seconds(time))).unwrap_or_default(),
            decision.path.clone(),
        ]
        .map(|cell| printable(&cell))
    };
    let rows: Vec<[String; 6]> = here.take(most).map(row).collect();
    if rows.is_empty() {
        return vec![line("none of this router's last requests")];
    }
    table([Side::Left; 6], &rows).into_iter().map(Line::from).collect()
}

fn chosen(decision: &Decision) -> Option<&hostler_proto::fleet::v1::Scored> {
    decision.scored.get(usize::try_from(decision.chosen).ok()?)
}

fn reason_words(decision: &Decision) -> String {
    let of = decision.candidates;
    match decision.why.as_str() {
        "only" => "the only one".to_owned(),
        "near_tie" => format!("near tie of {}/{of}", decision.tied),
        "ends_first" => format!("all {of} end first"),
        "last_resort" => format!("all {of} doubtful"),
        _ => format!("cheapest of {of}"),
    }
}
