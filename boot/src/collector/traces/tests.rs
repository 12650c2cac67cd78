use super::*;

fn read(variables: &[(&str, &str)]) -> Result<Option<TraceSettings>, CollectorSettingsError> {
    TraceSettings::from_environment(|name| variables.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned()))
}

const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");

#[test]
fn traces_are_off_without_an_endpoint_or_when_disabled() {
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", ""), ("OTEL_TRACES_SAMPLER", "no sampler")]), Ok(None));
    assert_eq!(read(&[ENDPOINT, ("OTEL_SDK_DISABLED", "True")]), Ok(None));
    assert_eq!(read(&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]), Ok(None));
    let on = read(&[ENDPOINT, ("OTEL_SDK_DISABLED", "false"), ("OTEL_TRACES_EXPORTER", "otlp")]).unwrap().unwrap();
    assert_eq!(on, TraceSettings::for_endpoint("http://collector:4317".into()));
}

#[test]
fn settings_for_traces_override_settings_for_all_signals() {
    let read = read(&[
        ENDPOINT,
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:443/"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2000"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "4000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "64"),
    ]);
    let read = read.unwrap().unwrap();
    assert_eq!(read.collector.endpoint, "https://traces:443/");
    assert_eq!((read.collector.request_timeout, read.export_timeout), (Duration::from_secs(2), Duration::from_secs(4)));
    assert_eq!((read.export_interval, read.max_waiting_spans), (Duration::from_millis(100), 64));
}

#[test]
fn each_standard_sampler_has_its_rule() {
    let of = |variables: &[(&'static str, &'static str)]| {
        let rule = read(&[&[ENDPOINT], variables].concat()).unwrap().unwrap().sampling;
        (rule.follows_parent, rule.ratio)
    };
    assert_eq!(of(&[]), (true, 1.0));
    assert_eq!(of(&[("OTEL_TRACES_SAMPLER_ARG", "0.01")]), (true, 0.01), "the default sampler takes a ratio");
    for (name, expected) in [
        ("always_on", (false, 1.0)),
        ("always_off", (false, 0.0)),
        ("traceidratio", (false, 0.25)),
        ("parentbased_always_on", (true, 1.0)),
        ("parentbased_always_off", (true, 0.0)),
        ("parentbased_traceidratio", (true, 0.25)),
    ] {
        assert_eq!(of(&[("OTEL_TRACES_SAMPLER", name), ("OTEL_TRACES_SAMPLER_ARG", "0.25")]), expected, "{name}");
    }
}

#[test]
fn an_invalid_trace_setting_is_explained_without_its_value() {
    for (variable, value, words) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "is no URL such as http://localhost:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://user:password@collector", "is no URL"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/v1/traces", "has a path"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:password@collector:4317", "has a user in it"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "set it to that and the endpoint to the collector's port for gRPC"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "neither `otlp` nor `none`"),
        ("OTEL_TRACES_SAMPLER", "xray", "is none of always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", "is no number from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "NaN", "is no number from 0 to 1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "is no number of milliseconds"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "is no number of milliseconds"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1000000000", "is no number from 1 to 100000"),
    ] {
        let error = read(&[(variable, value), ENDPOINT]).unwrap_err().to_string();
        assert!(error.starts_with(variable) && error.contains(words) && !error.contains(value), "{error}");
    }
}

#[test]
fn sampling_follows_the_client_or_else_the_trace_id() {
    let rule = |follows_parent, ratio| SamplingRule { follows_parent, ratio };
    for parent in [None, Some(false), Some(true)] {
        assert_eq!(rule(true, 0.0).is_sampled(1, parent), parent == Some(true));
        assert_eq!(rule(true, 1.0).is_sampled(u128::MAX, parent), parent != Some(false));
        assert!(!rule(false, 0.0).is_sampled(0, parent) && rule(false, 1.0).is_sampled(u128::MAX, parent));
    }
    // The lower half of the id decides, as in the SDKs.
    let half = rule(true, 0.5);
    assert!(half.is_sampled((u128::MAX << 64) | 0x7fff_ffff_ffff_ffff, None) && !half.is_sampled(0x8000_0000_0000_0000, None));
}

#[test]
fn a_sampling_ratio_is_the_share_of_traced_requests() {
    let rule = SamplingRule { follows_parent: true, ratio: 0.01 };
    // Ids that are evenly spread over their range.
    let step = u64::MAX / 100_000;
    let sampled = (0..100_000_u64).filter(|at| rule.is_sampled(u128::from(at * step), None)).count();
    assert!((990..=1010).contains(&sampled), "{sampled}");
}
