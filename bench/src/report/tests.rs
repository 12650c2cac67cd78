//! Tables, documents and pages for measurements that are written down here.

use proptest::prelude::*;

use super::plot::{Axis, Curve, Labels, Marks, Point, lines};
use super::rows::{NumberFormat, Spread, number};
use super::*;
use crate::figures::{FleetFigures, Quantiles, Second, Totals};

fn times(p50: f64) -> Quantiles {
    Quantiles { count: 1200, mean: p50 * 1.1, p50, p90: p50 * 1.8, p99: p50 * 3.5, max: p50 * 6.0 }
}

/// A load whose times are this many times as long as usual.
fn totals(slower: f64) -> Totals {
    Totals {
        requests: 1200,
        complete: 1200,
        seconds: 30.0,
        requests_per_second: 40.0 / slower,
        output_tokens_per_second: 5120.0 / slower,
        prompt_tokens_per_second: 20_480.0 / slower,
        prompt_tokens_mean: Some(512.0),
        output_tokens_mean: Some(128.0),
        cached_share: Some(0.42),
        goodput: Some(38.0 / slower),
        met: Some(0.95),
        ttft_ms: times(25.0 * slower),
        itl_ms: times(7.5 * slower),
        tpot_ms: times(7.6 * slower),
        e2e_ms: times(990.0 * slower),
        late_ms: times(0.02),
        ..Totals::default()
    }
}

fn round(slower: f64) -> Figures {
    let second = |at: u32| Second {
        at,
        in_flight: 40 + at % 5,
        complete: 40,
        failed: 0,
        tokens: 5000 + 37 * (at % 7),
        ttft_p50_ms: 24.0 * slower + f64::from(at % 3),
        kv_use: Some(0.01 * f64::from(at)),
    };
    let fleet = FleetFigures { prefix_hit_rate: Some(0.415), kv_use_mean: Some(0.2), kv_use_max: Some(0.31) };
    Figures { all: totals(slower), series: (0..12).map(second).collect(), fleet: Some(fleet), ..Figures::default() }
}

fn target(name: &str, rounds: Vec<Figures>) -> TargetReport {
    let url = format!("http://127.0.0.1/{name}");
    TargetReport { name: name.into(), url, model: "tiny".into(), rounds, sweep: Vec::new(), broke: None }
}

fn report(scenario: &str, targets: Vec<TargetReport>) -> Report {
    let settings = [("--rate", "40"), ("--rounds", "3"), ("load", "512 tokens in, 128 out")];
    let machine = Machine { processor: "Test CPU".into(), cores: 2, system: "Linux 6.1".into(), hostler: "0.1.0".into() };
    Report {
        scenario: scenario.into(),
        began: "2026-01-02 03:04:05 UTC".into(),
        settings: settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        machine,
        targets,
    }
}

/// Two targets and three rounds, in which the second target fails some requests.
fn side_by_side() -> Report {
    let mut failing = round(1.04);
    failing.all.failed = [("status 429".to_owned(), 3), ("broken".to_owned(), 1)].into();
    failing.all.complete -= 4;
    report(
        "sustained",
        vec![target("direct", [1.0, 1.02, 0.99].map(round).into()), target("hostler", vec![round(1.01), failing, round(1.0)])],
    )
}

fn mixed() -> Report {
    let of_kinds = |slower: f64| {
        let kinds = [("short chat".to_owned(), totals(slower / 2.0)), ("long context".to_owned(), totals(slower * 3.0))];
        Figures { kinds: kinds.into(), fleet: None, ..round(slower) }
    };
    report("mixed", vec![target("direct", vec![of_kinds(1.0)]), target("hostler", vec![of_kinds(1.1)])])
}

fn sweep() -> Report {
    let step = |concurrency: u32, knee: f64| {
        let clients = f64::from(concurrency);
        let busy = 1.0 + clients / knee;
        let mut all = totals(busy);
        all.requests_per_second = clients / busy;
        all.output_tokens_per_second = 128.0 * clients / busy;
        SweepStep { round: 0, concurrency, figures: Figures { all, ..Figures::default() } }
    };
    let swept = |name: &str, knee: f64, broke: Option<&str>| TargetReport {
        sweep: [1, 5, 10, 50, 100, 250, 500].map(|clients| step(clients, knee)).into(),
        broke: broke.map(str::to_owned),
        ..target(name, Vec::new())
    };
    report("sweep", vec![swept("direct", 80.0, Some("broke at 500 clients: TTFT p99 above 500 ms")), swept("hostler", 110.0, None)])
}

#[test]
fn the_table_compares_targets_with_ranges_and_ratios() {
    insta::assert_snapshot!(table(&side_by_side()));
}

#[test]
fn the_table_of_one_round_shows_kinds_without_ranges() {
    insta::assert_snapshot!(table(&mixed()));
}

#[test]
fn a_table_of_a_sweep_says_where_it_broke() {
    insta::assert_snapshot!(table(&sweep()));
}

#[test]
fn the_json_holds_the_report_and_its_format_version() {
    let report = report("burst", vec![target("direct", vec![Figures { series: vec![Second::default()], ..round(1.0) }])]);
    insta::assert_snapshot!(json(&report));
}

#[test]
fn a_page_shows_the_load() {
    insta::assert_snapshot!(without_style(&html(&side_by_side())));
}

#[test]
fn a_page_shows_a_sweep() {
    insta::assert_snapshot!(without_style(&html(&sweep())));
}

fn without_style(page: &str) -> String {
    let (before, rest) = page.split_once("<style>").unwrap();
    format!("{before}{}", rest.split_once("</style>").unwrap().1)
}

#[test]
fn the_page_loads_nothing_from_outside() {
    for report in [side_by_side(), mixed(), sweep()] {
        let page = html(&report);
        for outside in ["<script", "src=", "<link", "@import", "url(", "href"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}

#[test]
fn names_from_outside_are_escaped() {
    let mut report = side_by_side();
    report.targets[1].name = r#"<b onclick="x">&"#.into();
    report.targets[1].rounds[0].all.failed = [("<i>".to_owned(), 1)].into();
    let page = html(&report);
    assert!(!page.contains("<b onclick") && !page.contains("<i>"), "{page}");
    assert!(page.contains("&lt;b onclick=&quot;x&quot;&gt;&amp;"));
}

#[test]
fn every_tag_of_the_page_is_closed() {
    for report in [side_by_side(), mixed(), sweep()] {
        let page = html(&report);
        let mut open: Vec<&str> = Vec::new();
        for tag in page.split('<').skip(1) {
            let inner = tag.split('>').next().unwrap();
            let name = inner.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
            if inner.starts_with('!') || inner.ends_with('/') || name == "meta" {
                continue;
            }
            if inner.starts_with('/') {
                assert_eq!(open.pop(), Some(name));
            } else {
                open.push(name);
            }
        }
        assert_eq!(open, Vec::<&str>::new());
    }
}

#[test]
fn late_generators_and_failures_are_not_hidden() {
    let mut report = side_by_side();
    report.targets[0].rounds[1].all.late_ms = times(100.0);
    let text = table(&report);
    assert!(text.contains("direct: requests were sent up to 350 ms late (p99)"), "{text}");
    assert!(text.contains("hostler: 4 of 3600 requests failed"), "{text}");
    let mut hurried = sweep();
    hurried.targets[1].sweep[4].figures.all.complete = 150;
    assert!(table(&hurried).contains("hostler: the step of 100 clients had only 150 complete answers"));
    report.targets[0].rounds[2].all.complete = 7;
    assert!(table(&report).contains("direct: a round had only 7 complete answers"));
}

#[test]
fn an_empty_report_is_still_a_report() {
    for report in [report("burst", Vec::new()), report("burst", vec![target("direct", vec![Figures::default()])])] {
        assert!(table(&report).starts_with("burst, 2026"));
        assert!(html(&report).ends_with("</html>\n"));
    }
}

#[test]
fn numbers_are_written_with_their_significant_digits() {
    let written = [0.0, 0.004, 0.25, 9.99, 10.0, 99.94, 99.96, 1234.6, 1_234_567.0].map(number);
    assert_eq!(written, ["0", "0.004", "0.25", "9.99", "10.0", "99.9", "100", "1,235", "1,234,567"]);
    assert_eq!([NumberFormat::Share.format_value(0.5), NumberFormat::Count.format_value(1200.0)], ["50.0 %", "1,200"]);
}

#[test]
fn a_median_of_two_rounds_is_between_them() {
    let spread = Spread::of([3.0, 1.0].into_iter()).unwrap();
    assert_eq!(spread, Spread { median: 2.0, least: 1.0, most: 3.0 });
    assert_eq!(Spread::of(std::iter::empty()), None);
}

proptest! {
    #[test]
    fn every_measured_point_is_drawn_within_the_chart(points in prop::collection::vec((any::<f64>(), any::<f64>()), 0..20)) {
        let x = Axis::linear(points.iter().map(|point| point.0).fold(0.0, f64::max));
        let y = Axis::logarithmic(points.iter().map(|point| point.1));
        let points = points.iter().map(|(x, y)| Point { x: *x, y: *y, clients: 1 }).filter(|point| point.x > 0.0 && point.y > 0.0);
        let curve = Curve { target: 0, name: "direct".into(), points: points.collect(), marks: Marks::Clients };
        let text = lines(&Labels { title: "a", x: "b", y: "c" }, &[curve], &x, &y);
        for place in text.split("cx=\"").skip(1) {
            let across: f64 = place.split('"').next().unwrap().parse().unwrap();
            prop_assert!((0.0..=560.0).contains(&across), "{}", text);
        }
        prop_assert!(!text.contains("NaN"), "{}", text);
    }
}
