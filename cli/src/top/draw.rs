//! Draws the model's state as cells of the screen. Pure.

mod detail;
mod figures;
mod header;
mod lists;
mod overlay;
mod palette;
mod screen_table;

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

use self::figures::clock;
use self::palette::Palette;
use super::model::{KeyMode, Panel, TopModel};
use super::text::{is_printable, printable};

/// Smallest screen on which a list is readable.
const LEAST_WIDTH: u16 = 50;
const LEAST_HEIGHT: u16 = 14;

/// Height from which there is room to space things out.
const TALL: u16 = 30;

/// Rows kept for events, however many replicas there are. If the replicas leave room, more are
/// shown.
const EVENT_ROWS: u16 = 4;

/// Lines below the lists: the status, and the keys.
const FOOT: u16 = 2;

pub(super) fn draw(frame: &mut Frame<'_>, model: &TopModel) {
    let area = frame.area();
    let palette = Palette { has_color: model.has_color };
    let buffer = frame.buffer_mut();
    if area.width < LEAST_WIDTH || area.height < LEAST_HEIGHT {
        let words = format!("{}×{} is too small: {LEAST_WIDTH}×{LEAST_HEIGHT} at least", area.width, area.height);
        write(buffer, area, 0, &Line::from(words));
        return;
    }
    let inner = Rect { height: area.height - FOOT, ..area };
    match &model.detail {
        Some(shown) => detail::draw_detail(buffer, inner, model, (shown, palette)),
        None => draw_lists(buffer, inner, model, palette),
    }
    let foot = Rect { y: area.bottom() - FOOT, height: FOOT, ..area };
    write(buffer, foot, 0, &status_line(model, palette));
    write(buffer, foot, 1, &key_line(model, palette, area.width));
    match &model.mode {
        KeyMode::Ask(question) => overlay::draw_question(buffer, area, question, palette),
        KeyMode::Help => overlay::draw_help(buffer, area, palette),
        KeyMode::Browse | KeyMode::Filter => {}
    }
    cleanse(buffer);
}

/// Removes everything that a terminal would obey from all cells, whatever was written.
fn cleanse(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        if !cell.symbol().chars().all(is_printable) {
            cell.set_symbol("·");
        }
    }
}

/// Draws totals, then nodes, replicas and events. The list in which keys move comes before the
/// other one.
fn draw_lists(buffer: &mut Buffer, area: Rect, model: &TopModel, palette: Palette) {
    let mut top = area.y;
    let mut take = |height: u16| {
        let taken = Rect { y: top, height: height.min(area.bottom().saturating_sub(top)), ..area };
        top = taken.bottom();
        taken
    };
    let head = header::header_lines(model, palette);
    write_all(buffer, take(height_of(head.len())), &head);
    let gap = u16::from(area.height + FOOT >= TALL);
    let rows = area.height.saturating_sub(height_of(head.len()) + EVENT_ROWS + 1 + 2 + 3 * gap);
    let (nodes, replicas) = (height_of(model.shown_nodes().len()), height_of(model.shown_replicas().len()).max(1));
    let other = (rows / 3).max(1);
    let node_rows = match model.panel {
        Panel::Replicas => nodes.min(other.max(rows.saturating_sub(replicas))),
        Panel::Nodes => nodes.min(rows.saturating_sub(replicas.min(other))),
    };
    take(gap);
    if nodes > 0 {
        lists::node_table(model, palette).draw(buffer, take(node_rows.max(1) + 1), palette);
        take(gap);
    }
    let place = take(replicas.min(rows.saturating_sub(node_rows)).max(1) + 1);
    if model.shown_replicas().is_empty() {
        write(buffer, place, 0, &line(&lists::emptiness(model)));
    } else {
        lists::replica_table(model, palette).draw(buffer, place, palette);
    }
    take(gap);
    draw_events(buffer, take(area.height), model, palette);
}

fn draw_events(buffer: &mut Buffer, area: Rect, model: &TopModel, palette: Palette) {
    write(buffer, area, 0, &Line::styled(format!("{:width$}", "EVENTS (UTC)", width = area.width.into()), palette.heading(false)));
    let room = Rect { y: area.y + 1, height: area.height.saturating_sub(1), ..area };
    let shown = model.events.latest(room.height.into());
    let lines: Vec<Line<'static>> = shown
        .map(|event| {
            let style = if event.is_grave { palette.alarm() } else { palette.plain() };
            Line::from(vec![span(&clock(event.at), palette.label()), span(&format!("  {}", event.words), style)])
        })
        .collect();
    write_all(buffer, room, &lines);
}

/// Trouble with the router, else the result of the last key or order, else how the list is sorted.
fn status_line(model: &TopModel, palette: Palette) -> Line<'static> {
    if let Some(silence) = &model.silence {
        let seconds = model.now.at.saturating_duration_since(silence.since.at).as_secs();
        let since = clock(silence.since.wall);
        let words = format!("no answer since {since} UTC ({seconds} s), trying again; figures are old: {}", silence.cause);
        return Line::from(span(&words, palette.alarm()));
    }
    if model.mode == KeyMode::Filter {
        return line(&format!("filter: {}_   (Enter keeps it, Esc clears it)", model.filter));
    }
    if !model.notice.is_empty() {
        return Line::from(span(&model.notice, palette.strong()));
    }
    if model.detail.is_some() {
        return Line::default();
    }
    let reversed = if model.is_reversed { ", reversed" } else { "" };
    let filter = if model.filter.is_empty() { String::new() } else { format!("; filter: {}", model.filter) };
    let selected = lists::selected_remark(model).map(|words| format!("; {words}")).unwrap_or_default();
    line(&format!("sorted by {}{reversed}{filter}{selected}", model.sort.as_str()))
}

fn key_line(model: &TopModel, palette: Palette, columns: u16) -> Line<'static> {
    let keys: &[(&str, &str)] = match (&model.mode, &model.detail) {
        (KeyMode::Ask(_), _) => &[("y", "yes"), ("any other key", "no")],
        (KeyMode::Help, _) => &[("any key", "back")],
        (KeyMode::Filter, _) => &[("Enter", "keep"), ("Esc", "clear")],
        (KeyMode::Browse, Some(_)) => &[("Esc", "back"), ("d", "drain"), ("r", "restart"), ("l", "release"), ("?", "help"), ("q", "quit")],
        (KeyMode::Browse, None) => &[
            ("Enter", "open"),
            ("d", "drain"),
            ("r", "restart"),
            ("l", "release"),
            ("s", "sort"),
            ("/", "filter"),
            ("Tab", "nodes"),
            ("?", "help"),
            ("q", "quit"),
        ],
    };
    // If there is no room for all keys, help describes the missing one.
    let shown = keys.iter().filter(|(key, _)| columns >= 90 || *key != "Tab");
    let spans = shown.flat_map(|(key, does)| [span(key, palette.strong()), span(&format!(" {does}  "), palette.label())]);
    Line::from(spans.collect::<Vec<_>>())
}

/// Makes text of any origin fit for cells.
fn span(words: &str, style: ratatui::style::Style) -> Span<'static> {
    Span::styled(printable(words), style)
}

fn line(words: &str) -> Line<'static> {
    Line::from(printable(words))
}

fn write(buffer: &mut Buffer, area: Rect, row: u16, line: &Line<'_>) {
    if row < area.height {
        buffer.set_line(area.x, area.y + row, line, area.width);
    }
}

fn write_all(buffer: &mut Buffer, area: Rect, lines: &[Line<'_>]) {
    (0..area.height).zip(lines).for_each(|(row, line)| write(buffer, area, row, line));
}

fn height_of(lines: usize) -> u16 {
    u16::try_from(lines).unwrap_or(u16::MAX)
}
