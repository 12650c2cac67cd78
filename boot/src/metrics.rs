//! Metrics of a role: a registry that remembers its content, and tables of figures.
//!
//! `docs/metrics.md` is generated from the registry. Collectors read the figures from the role's
//! state when the page is requested.

use std::borrow::Borrow;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Prefix of every name.
const PREFIX: &str = "hostler";

/// A line of `docs/metrics.md`.
#[derive(Debug)]
pub struct MetricDescription {
    /// Name as scraped.
    pub name: String,
    /// Counter, gauge or histogram.
    pub kind: MetricType,
    /// Label names, in order.
    pub labels: Vec<&'static str>,
    /// Meaning of the metric.
    pub help: &'static str,
}

impl MetricDescription {
    fn new(name: &str, kind: MetricType, labels: &[&'static str], help: &'static str) -> Self {
        let suffix = if matches!(kind, MetricType::Counter) { "_total" } else { "" };
        Self { name: format!("{PREFIX}_{name}{suffix}"), kind, labels: labels.to_vec(), help }
    }
}

/// A Prometheus registry with its own list of contents. It adds the prefix `hostler_` to names, and
/// the suffix `_total` to those of counters.
#[derive(Debug)]
pub struct MetricRegistry {
    registry: Registry,
    descriptions: Vec<MetricDescription>,
}

impl Default for MetricRegistry {
    fn default() -> Self {
        Self { registry: Registry::with_prefix(PREFIX), descriptions: Vec::new() }
    }
}

impl MetricRegistry {
    /// Registers a clone of `metric` and returns it for counting.
    pub fn register<M: Metric + Clone>(&mut self, name: &str, help: &'static str, metric: M) -> M {
        self.register_labelled(name, &[], help, metric)
    }

    /// Registers a counter for each value of a label, and returns them in the order of the values.
    pub fn register_counters<const N: usize>(
        &mut self,
        name: &str,
        label: &'static str,
        help: &'static str,
        values: [&'static str; N],
    ) -> [Counter; N] {
        let family = self.register_labelled(name, &[label], help, Family::<[(&str, &str); 1], Counter>::default());
        values.map(|value| family.get_or_create(&[(label, value)]).clone())
    }

    fn register_labelled<M: Metric + Clone>(&mut self, name: &str, labels: &[&'static str], help: &'static str, metric: M) -> M {
        self.descriptions.push(MetricDescription::new(name, metric.metric_type(), labels, help));
        // The registry adds the full stop again.
        let ended = help.trim_end_matches('.');
        match name.strip_suffix("_seconds") {
            Some(name) => self.registry.register_with_unit(name, ended, Unit::Seconds, metric.clone()),
            None => self.registry.register(name, ended, metric.clone()),
        }
        metric
    }

    /// Describes a table that a collector encodes.
    pub fn describe<T>(&mut self, table: &FigureTable<T>) {
        let described = |figure: &Figure<T>| MetricDescription::new(figure.name, figure.kind, table.labels, figure.help);
        self.descriptions.extend(table.figures.iter().map(described));
    }

    /// Adds a collector, which the page reads each time.
    pub fn register_collector(&mut self, collector: impl Collector) {
        self.registry.register_collector(Box::new(collector));
    }

    /// Metrics on the page, in order.
    #[must_use]
    pub fn descriptions(&self) -> &[MetricDescription] {
        &self.descriptions
    }

    /// Renders the page in OpenMetrics 1.0.0.
    #[must_use]
    pub fn render(&self) -> String {
        let mut page = String::with_capacity(16 * 1024);
        encode(&mut page, &self.registry).expect("writing to a String cannot fail");
        page
    }
}

/// Value of a figure. Counts are written as whole numbers.
#[derive(Debug, Clone, Copy)]
pub enum FigureValue {
    /// A whole number.
    Count(u64),
    /// Any number.
    Measure(f64),
    /// Unknown now, and therefore not on the page.
    Unknown,
}

macro_rules! figure_values {
    ($($variant:ident($wide:ty): $($narrow:ty),+);+) => {$($(
        impl From<$narrow> for FigureValue {
            fn from(value: $narrow) -> Self {
                Self::$variant(value as $wide)
            }
        }
    )+)+};
}

figure_values!(Count(u64): bool, u32, u64, usize; Measure(f64): f32, f64);

impl<V: Into<Self>> From<Option<V>> for FigureValue {
    fn from(value: Option<V>) -> Self {
        value.map_or(Self::Unknown, Into::into)
    }
}

/// A figure that is read from a `T` when the page is requested.
#[derive(Debug)]
pub struct Figure<T> {
    name: &'static str,
    kind: MetricType,
    help: &'static str,
    value: fn(&T) -> FigureValue,
}

/// A figure that may rise and fall.
pub const fn gauge<T>(name: &'static str, help: &'static str, value: fn(&T) -> FigureValue) -> Figure<T> {
    Figure { name, kind: MetricType::Gauge, help, value }
}

/// A figure that only rises.
pub const fn counter<T>(name: &'static str, help: &'static str, value: fn(&T) -> FigureValue) -> Figure<T> {
    Figure { name, kind: MetricType::Counter, help, value }
}

impl<T> Figure<T> {
    fn encode_sample(&self, item: &T, mut sample: MetricEncoder<'_>) -> fmt::Result {
        match (self.kind, (self.value)(item)) {
            (_, FigureValue::Unknown) => Ok(()),
            (MetricType::Counter, FigureValue::Count(value)) => sample.encode_counter::<NoLabelSet, _, u64>(&value, None),
            (MetricType::Counter, FigureValue::Measure(value)) => sample.encode_counter::<NoLabelSet, _, u64>(&value, None),
            (_, FigureValue::Count(value)) => sample.encode_gauge(&value),
            (_, FigureValue::Measure(value)) => sample.encode_gauge(&value),
        }
    }
}

/// Figures that every `T` has, and the labels that distinguish one `T` from another.
#[derive(Debug)]
pub struct FigureTable<T: 'static> {
    /// Names of the labels.
    pub labels: &'static [&'static str],
    /// The figures.
    pub figures: &'static [Figure<T>],
}

impl<T> FigureTable<T> {
    /// Writes the figures of all `items`, each with its label values.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>, items: &[(Vec<String>, impl Borrow<T>)]) -> fmt::Result {
        for figure in self.figures {
            let mut family = encoder.encode_descriptor(figure.name, figure.help, None, figure.kind)?;
            for (values, item) in items {
                let labels: Vec<(&str, &String)> = self.labels.iter().copied().zip(values).collect();
                figure.encode_sample(item.borrow(), family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// Writes the figures of the only `T`, which needs no labels.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn encode_only(&self, encoder: &mut DescriptorEncoder<'_>, item: &T) -> fmt::Result {
        let mut figures = self.figures.iter();
        figures.try_for_each(|figure| figure.encode_sample(item, encoder.encode_descriptor(figure.name, figure.help, None, figure.kind)?))
    }
}
