//! A registry that remembers what was registered, so that `docs/metrics.md` is made from the program itself.

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::{Metric, Registry, Unit};

/// One line of `docs/metrics.md`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricDescription {
    /// Name as scraped.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Label names, in order.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

/// A Prometheus registry with its own list of what is in it. Every name begins with `hostler_`.
#[derive(Debug)]
pub struct MetricRegistry {
    registry: Registry,
    descriptions: Vec<MetricDescription>,
}

impl Default for MetricRegistry {
    fn default() -> Self {
        Self { registry: Registry::with_prefix("hostler"), descriptions: Vec::new() }
    }
}

impl MetricRegistry {
    /// Registers a clone of `metric` and gives it back, to be kept where it is counted. `_total` is added to the name.
    pub fn register<M: Metric + Clone>(&mut self, name: &str, labels: &'static [&'static str], help: &'static str, metric: M) -> M {
        self.descriptions.push(MetricDescription { name: format!("hostler_{name}_total"), kind: "counter", labels, help });
        self.registry.register(name, help.trim_end_matches('.'), metric.clone());
        metric
    }

    /// As `counter`, for a distribution in seconds; `_seconds` is added to the name.
    pub fn register_seconds<M: Metric + Clone>(&mut self, name: &str, labels: &'static [&'static str], help: &'static str, metric: M) -> M {
        self.descriptions.push(MetricDescription { name: format!("hostler_{name}_seconds"), kind: "histogram", labels, help });
        self.registry.register_with_unit(name, help.trim_end_matches('.'), Unit::Seconds, metric.clone());
        metric
    }

    /// As `counter`, for a distribution of anything but seconds; nothing is added to the name.
    pub fn register_histogram<M: Metric + Clone>(
        &mut self,
        name: &str,
        labels: &'static [&'static str],
        help: &'static str,
        metric: M,
    ) -> M {
        self.descriptions.push(MetricDescription { name: format!("hostler_{name}"), kind: "histogram", labels, help });
        self.registry.register(name, help.trim_end_matches('.'), metric.clone());
        metric
    }

    /// Describes what another writer adds to the same page.
    pub fn describe(&mut self, described: impl IntoIterator<Item = MetricDescription>) {
        self.descriptions.extend(described);
    }

    /// What is registered, in order.
    #[must_use]
    pub fn descriptions(&self) -> &[MetricDescription] {
        &self.descriptions
    }

    /// The page in the OpenMetrics text format, without its last line `# EOF` so that more can follow.
    #[must_use]
    pub fn render(&self) -> String {
        let mut page = String::with_capacity(16 * 1024);
        encode(&mut page, &self.registry).expect("writing to a String cannot fail");
        page.truncate(page.len().saturating_sub("# EOF\n".len()));
        page
    }
}

/// The content type of a metrics page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
