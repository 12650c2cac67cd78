use http::HeaderValue;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use proptest::prelude::*;

use super::*;

fn format_for(accepts: &[&'static str]) -> TextFormat {
    TextFormat::accepted_by(&accepts.iter().map(|accept| (ACCEPT, HeaderValue::from_static(accept))).collect())
}

#[test]
fn every_prometheus_version_that_asks_for_openmetrics_gets_it() {
    // What Prometheus 2.5, 2.42 and 3.5 send.
    for accept in [
        "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
         text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    ] {
        let expected = if accept.contains("1.0.0") { TextFormat::OpenMetrics } else { TextFormat::Prometheus };
        assert_eq!(format_for(&[accept]), expected, "{accept}");
    }
}

#[test]
fn openmetrics_is_sent_only_when_named_and_preferred() {
    for accept in [
        "application/openmetrics-text",
        "Application/OpenMetrics-Text ; Version=\"1.0.0\" ; Q=0.1",
        "text/plain;q=0.5, application/openmetrics-text;q=0.5",
        "text/plain;version=1.0.0, application/openmetrics-text;q=0.5",
        "text/html, */*;q=0.8, application/openmetrics-text;q=0.1",
    ] {
        assert_eq!(format_for(&[accept]), TextFormat::OpenMetrics, "{accept}");
    }
    assert_eq!(format_for(&["text/plain;q=0.5", "application/openmetrics-text"]), TextFormat::OpenMetrics, "two lines");
    for accept in [
        "",
        "*/*",
        "application/*",
        "text/plain",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=nan",
        "application/openmetrics-text;q=",
        "application/openmetrics-text;version=2.0.0",
        "application/openmetrics-text;q=0.4, text/plain;q=0.5",
        "application/openmetrics-textual",
        ";;,,=;q=1",
    ] {
        assert_eq!(format_for(&[accept]), TextFormat::Prometheus, "{accept}");
    }
    assert_eq!(format_for(&[]), TextFormat::Prometheus);
}

#[test]
fn openmetrics_declarations_become_those_of_the_text_format() {
    let openmetrics = "# HELP reads Reads of a file.\n# TYPE reads counter\nreads_total{file=\"# EOF\"} 1\n\
                       # HELP wait_seconds How long.\n# TYPE wait_seconds histogram\n# UNIT wait_seconds seconds\nwait_seconds_sum 0.0\n\
                       wait_seconds_count 0\nwait_seconds_bucket{le=\"+Inf\"} 0\n# HELP reads_now Under way.\n# TYPE reads_now gauge\nreads_now 1\n# EOF\n";
    let text = "# HELP reads_total Reads of a file.\n# TYPE reads_total counter\nreads_total{file=\"# EOF\"} 1\n\
                # HELP wait_seconds How long.\n# TYPE wait_seconds histogram\nwait_seconds_sum 0.0\n\
                wait_seconds_count 0\nwait_seconds_bucket{le=\"+Inf\"} 0\n# HELP reads_now Under way.\n# TYPE reads_now gauge\nreads_now 1\n";
    assert_eq!(TextFormat::Prometheus.convert(openmetrics.to_owned()), text);
    assert_eq!(TextFormat::OpenMetrics.convert(openmetrics.to_owned()), openmetrics);
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

type Labels = Vec<(String, String)>;

fn registry(families: &[(String, Kind, String, Vec<String>)]) -> Registry {
    let mut registry = Registry::default();
    for (index, (name, kind, help, values)) in families.iter().enumerate() {
        let name = format!("{name}_{index}");
        let labels = || values.iter().map(|value| vec![("label".to_owned(), value.clone())]);
        match kind {
            Kind::Counter => {
                let family = Family::<Labels, Counter>::default();
                labels().for_each(|labels| {
                    family.get_or_create(&labels).inc();
                });
                registry.register(name, help, family);
            }
            Kind::Gauge => {
                let family = Family::<Labels, Gauge>::default();
                labels().for_each(|labels| {
                    family.get_or_create(&labels).inc();
                });
                registry.register(name, help, family);
            }
            Kind::Histogram => {
                let family = Family::<Labels, Histogram>::new_with_constructor(|| Histogram::new([0.5, 1.0]));
                labels().for_each(|labels| family.get_or_create(&labels).observe(0.7));
                registry.register_with_unit(name, help, Unit::Seconds, family);
            }
        }
    }
    registry
}

fn samples(page: &str) -> Vec<&str> {
    page.split_terminator('\n').filter(|line| !line.starts_with('#')).collect()
}

proptest! {
    #[test]
    fn converted_pages_keep_all_samples_beside_their_declarations(
        families in prop::collection::vec(
            (
                "[a-z_]{1,8}(_total)?",
                prop::sample::select(vec![Kind::Counter, Kind::Gauge, Kind::Histogram]),
                "[ -~&&[^\\\\]]{0,20}",
                prop::collection::vec("(# EOF|# UNIT|# TYPE x counter|[\\x00-\\x7fäß]){0,4}", 1..3),
            ),
            0..6,
        ),
    ) {
        let mut openmetrics = String::new();
        encode(&mut openmetrics, &registry(&families)).unwrap();
        let text = TextFormat::Prometheus.convert(openmetrics.clone());
        prop_assert_eq!(samples(&text), samples(&openmetrics));
        let mut declared = ("", "");
        let mut helped = "";
        for line in text.split_terminator('\n') {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "HELP", name, _] => helped = name,
                ["#", "TYPE", name, kind] => {
                    prop_assert_eq!(name, helped);
                    declared = (name, kind);
                }
                _ => {
                    prop_assert!(!line.starts_with('#'), "{}", line);
                    let (name, kind) = declared;
                    let suffixes: &[&str] = if kind == "histogram" { &["_sum", "_count", "_bucket"] } else { &[""] };
                    let sampled = line.split('{').next().unwrap();
                    prop_assert!(suffixes.iter().any(|suffix| sampled.strip_suffix(suffix) == Some(name)), "{} after {}", line, name);
                    prop_assert!(kind != "counter" || name.ends_with("_total"));
                }
            }
        }
    }

    #[test]
    fn no_odd_accept_header_causes_a_panic(accept in "[ -~]{0,80}") {
        let headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_str(&accept).unwrap())]);
        let format = TextFormat::accepted_by(&headers);
        prop_assert!(format == TextFormat::Prometheus || accept.to_ascii_lowercase().contains("openmetrics"));
    }
}
