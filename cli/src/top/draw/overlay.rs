//! Boxes in the middle of the screen until a key is pressed: the question before an order, and
//! help.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear, Widget};

use super::palette::Palette;
use super::{height_of, line, span, write_all};
use crate::top::order::Question;
use crate::top::text::{printable, wrap};

/// Columns of text in a box.
const WIDTH: u16 = 64;

const HELP: [(&str, &str); 11] = [
    ("up, down, k, j", "select; PgUp, PgDn, g and G go further"),
    ("Enter", "open a replica: its log, and why requests came; of a node, its replicas"),
    ("Tab", "nodes instead of replicas, and back"),
    ("s", "sort by node, phase, running, waiting, KV use, tokens/s, first token"),
    ("S", "the other way round"),
    ("/", "filter by replica, phase, model or job; Esc shows all"),
    ("d, r, l", "drain, restart, release what is selected; you are asked first"),
    ("Ctrl-L, Ctrl-Z", "draw anew; back to the shell until `fg`"),
    ("q, Esc, Ctrl-C", "quit"),
    ("FIRST, P99", "first tokens of this router's last streams: median, and 99 %"),
    ("CACHED, HITS", "KV blocks that are cached; prompt tokens found there so far"),
];

pub(super) fn draw_help(buffer: &mut Buffer, area: Rect, palette: Palette) {
    let lines: Vec<Line<'static>> = HELP
        .iter()
        .flat_map(|(keys, does)| {
            let parts = wrap(does, usize::from(WIDTH) - 16);
            let labels = std::iter::once(*keys).chain(std::iter::repeat(""));
            let lines = parts
                .into_iter()
                .zip(labels)
                .map(|(part, keys)| Line::from(vec![span(&format!("{keys:<16}"), palette.strong()), span(&part, palette.plain())]));
            lines.collect::<Vec<_>>()
        })
        .collect();
    draw_box(buffer, area, &lines);
}

pub(super) fn draw_question(buffer: &mut Buffer, area: Rect, question: &Question, palette: Palette) {
    let mut lines = Vec::new();
    let columns = usize::from(WIDTH.min(area.width.saturating_sub(4)));
    for (index, sentence) in question.sentences().iter().enumerate() {
        let style = if index == 0 { palette.strong() } else { palette.plain() };
        lines.extend(wrap(&printable(sentence), columns).iter().map(|part| Line::from(span(part, style))));
    }
    lines.push(line(""));
    lines.push(Line::from(span("y/N", palette.strong())));
    draw_box(buffer, area, &lines);
}

fn draw_box(buffer: &mut Buffer, area: Rect, lines: &[Line<'_>]) {
    let (width, height) = ((WIDTH + 4).min(area.width), (height_of(lines.len()) + 2).min(area.height));
    let place = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    Clear.render(place, buffer);
    Block::bordered().render(place, buffer);
    let inner = Rect { x: place.x + 2, y: place.y + 1, width: width.saturating_sub(4), height: height.saturating_sub(2) };
    write_all(buffer, inner, lines);
}
