//! What a role counts and reads for its metrics page: a registry that remembers what is in it, so that `docs/metrics.md` is made from the program
//! itself, and tables of figures that collectors read from the role's state when the page is asked for.

use std::borrow::Borrow;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Before every name.
const PREFIX: &str = "hostler";

/// One line of `docs/metrics.md`.
#[derive(Debug)]
pub struct MetricDescription {
    /// Name as scraped.
    pub name: String,
    /// Counter, gauge or histogram.
    pub kind: MetricType,
    /// Label names, in order.
    pub labels: Vec<&'static str>,
    /// What it means.
    pub help: &'static str,
}

impl MetricDescription {
    fn new(name: &str, kind: MetricType, labels: &[&'static str], help: &'static str) -> Self {
        let suffix = if matches!(kind, MetricType::Counter) { "_total" } else { "" };
        Self { name: format!("{PREFIX}_{name}{suffix}"), kind, labels: labels.to_vec(), help }
    }
}

/// A Prometheus registry with its own list of what is in it. Names begin with `hostler_`, and those of counters end with `_total`; both are added.
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
    /// Registers a clone of `metric` and gives it back, to be kept where it is counted.
    pub fn register<M: Metric + Clone>(&mut self, name: &str, help: &'static str, metric: M) -> M {
        self.register_labelled(name, &[], help, metric)
    }

    /// A counter for each value that a label may have, in their order.
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
        // The registry ends it again.
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

    /// Has the page show what `collector` reads each time.
    pub fn register_collector(&mut self, collector: impl Collector) {
        self.registry.register_collector(Box::new(collector));
    }

    /// What is on the page, in order.
    #[must_use]
    pub fn descriptions(&self) -> &[MetricDescription] {
        &self.descriptions
    }

    /// The page, in OpenMetrics 1.0.0.
    #[must_use]
    pub fn render(&self) -> String {
        let mut page = String::with_capacity(16 * 1024);
        encode(&mut page, &self.registry).expect("writing to a String cannot fail");
        page
    }
}

/// What a figure reads. Counts are written as whole numbers.
#[derive(Debug, Clone, Copy)]
pub enum FigureValue {
    /// A whole number.
    Count(u64),
    /// Any number.
    Measure(f64),
    /// Not known now, and so not on the page.
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

/// A figure that is read from a `T` when the page is asked for.
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

/// Figures that every `T` has, and the labels that tell one `T` from another.
#[derive(Debug)]
pub struct FigureTable<T: 'static> {
    /// Names of the labels.
    pub labels: &'static [&'static str],
    /// The figures.
    pub figures: &'static [Figure<T>],
}

impl<T> FigureTable<T> {
    /// Writes the figures of all `items`, each of which comes with its labels' values.
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

    /// As `encode`, of the only `T` there is, which needs no labels.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn encode_only(&self, encoder: &mut DescriptorEncoder<'_>, item: &T) -> fmt::Result {
        let mut figures = self.figures.iter();
        figures.try_for_each(|figure| figure.encode_sample(item, encoder.encode_descriptor(figure.name, figure.help, None, figure.kind)?))
    }
}
