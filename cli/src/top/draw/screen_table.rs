//! A list on the screen, with as many columns as there is room for, and the rows around the
//! selected one.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use super::palette::Palette;
use super::write;
use crate::output::Side;
use crate::top::text::{cut, printable, width};

#[derive(Debug, Clone, Copy)]
pub(super) struct TableColumn {
    pub(super) title: &'static str,
    pub(super) side: Side,
    /// Columns of higher ranks are left out first.
    pub(super) rank: u8,
    /// Most columns of a cell; longer ones are cut. Numbers always get this width, so nothing moves
    /// when they change.
    pub(super) most: usize,
    /// Smallest width of a flexible column, which takes the rest of the line; 0 for a column as
    /// wide as its cells.
    pub(super) flexible_from: usize,
}

pub(super) const fn column(title: &'static str, side: Side, rank: u8, most: usize) -> TableColumn {
    TableColumn { title, side, rank, most, flexible_from: 0 }
}

#[derive(Debug)]
pub(super) struct TableCell {
    text: String,
    style: Style,
}

pub(super) fn cell(text: &str, style: Style) -> TableCell {
    TableCell { text: printable(text), style }
}

#[derive(Debug)]
pub(super) struct ScreenTable<const COLUMNS: usize> {
    pub(super) columns: [TableColumn; COLUMNS],
    pub(super) rows: Vec<[TableCell; COLUMNS]>,
    pub(super) selected: Option<usize>,
    /// Whether keys move in this list.
    pub(super) is_focused: bool,
    /// Whether the figures are out of date.
    pub(super) is_old: bool,
}

impl<const COLUMNS: usize> ScreenTable<COLUMNS> {
    pub(super) fn draw(&self, buffer: &mut Buffer, area: Rect, palette: Palette) {
        let widths = self.fit(area.width.into());
        let visible = usize::from(area.height.saturating_sub(1));
        let first = self.selected.map_or(0, |row| (row + 1).saturating_sub(visible));
        let heading = palette.heading(self.is_focused);
        let titles: Vec<Span<'_>> = self.line(&widths, |column| (self.columns[column].title, heading));
        let mut titles = Line::from(titles);
        titles.spans.insert(0, Span::styled(" ", heading));
        titles.spans.push(Span::styled(" ".repeat(area.width.into()), heading));
        write(buffer, area, 0, &titles);
        if self.rows.len() > visible {
            let place = format!(" {}-{} of {}", first + 1, (first + visible).min(self.rows.len()), self.rows.len());
            let room = Rect { x: area.right().saturating_sub(u16::try_from(place.len()).unwrap_or(0)), ..area };
            write(buffer, room, 0, &Line::styled(place, heading));
        }
        for (at, (index, row)) in (1..area.height).zip(self.rows.iter().enumerate().skip(first)) {
            let is_selected = self.selected == Some(index);
            let mark = if is_selected { ">" } else { " " };
            let mut spans = vec![Span::raw(mark)];
            spans.extend(self.line(&widths, |column| (row[column].text.as_str(), row[column].style)));
            write(buffer, area, at, &Line::from(spans));
            let style = match (self.is_old, is_selected && self.is_focused) {
                (_, true) => palette.selected(),
                (true, false) => palette.old(),
                (false, false) => continue,
            };
            buffer.set_style(Rect { y: area.y + at, height: 1, ..area }, style);
        }
    }

    /// Shown cells of one row, each as wide as its column, with a blank between them.
    fn line<'a>(&self, widths: &[usize; COLUMNS], cell: impl Fn(usize) -> (&'a str, Style)) -> Vec<Span<'static>> {
        let shown = (0..COLUMNS).filter(|column| widths[*column] > 0);
        let spans = shown.flat_map(|column| {
            let (text, style) = cell(column);
            let text = cut(text, widths[column]);
            let blanks = " ".repeat(widths[column].saturating_sub(width(&text)));
            let whole = if self.columns[column].side == Side::Left { text + &blanks } else { blanks + &text };
            [Span::styled(whole, style), Span::styled(" ", style)]
        });
        spans.collect()
    }

    /// Width of each column; 0 for columns without text or room.
    fn fit(&self, available: usize) -> [usize; COLUMNS] {
        let wanted: [usize; COLUMNS] = std::array::from_fn(|column| {
            let widest = self.rows.iter().map(|row| width(&row[column].text)).max().unwrap_or(0);
            let TableColumn { title, most, side, .. } = self.columns[column];
            match side {
                _ if widest == 0 => 0,
                Side::Left => widest.max(width(title)).min(most),
                Side::Right => most,
            }
        });
        let mut order: Vec<usize> = (0..COLUMNS).filter(|column| wanted[*column] > 0).collect();
        order.sort_by_key(|column| self.columns[*column].rank);
        let mut widths = [0; COLUMNS];
        // The first column is for the mark of the selection.
        let mut left = available.saturating_sub(1);
        for column in order {
            let flexible_from = self.columns[column].flexible_from;
            let least = if flexible_from > 0 { wanted[column].min(flexible_from) } else { wanted[column] };
            // The first two ranks are shown, however narrow the screen is.
            if least + 1 > left && self.columns[column].rank > 1 {
                break;
            }
            widths[column] = least.min(left);
            left = left.saturating_sub(least + 1);
        }
        if let Some(flexible) = (0..COLUMNS).find(|column| widths[*column] > 0 && self.columns[*column].flexible_from > 0) {
            widths[flexible] = wanted[flexible].min(widths[flexible] + left);
        }
        widths
    }
}
