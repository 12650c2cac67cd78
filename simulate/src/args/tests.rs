use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Program {
    #[command(flatten)]
    args: SimulateArgs,
}

fn parse(flags: &[&str]) -> SimulateArgs {
    Program::try_parse_from(std::iter::once(&"program").chain(flags)).unwrap().args
}

#[test]
fn the_flags_defaults_equal_those_of_the_structs() {
    let args = parse(&[]);
    assert_eq!((args.shape, args.fleet, args.objectives), (WorkloadShape::default(), SimulatedFleet::default(), Objectives::default()));
}

#[test]
fn results_are_written_to_the_requested_files() {
    let folder = std::env::temp_dir().join(format!("hostler-simulate-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (csv, json, svg) = (file("a.csv"), file("a.json"), file("a.svg"));
    let flags = ["--workload", "bursts,no-sharing", "--policies", "hostler,dynamo", "--requests", "40", "--replicas", "2"];
    let table = simulate(&parse(&[flags.as_slice(), &["--csv", &csv, "--json", &json, "--svg", &svg]].concat())).unwrap();
    assert_eq!(table.lines().count(), 7);
    assert_eq!(std::fs::read_to_string(csv).unwrap().lines().count(), 5);
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!((json[3]["policy"].as_str(), json[3]["requests"].as_u64()), (Some("dynamo"), Some(40)));
    assert!(std::fs::read_to_string(svg).unwrap().contains("no-sharing"));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_unwritable_result_file_is_named() {
    let args = parse(&["--workload", "bursts", "--requests", "2", "--policies", "dynamo", "--csv", "/nowhere/at-all.csv"]);
    assert!(simulate(&args).unwrap_err().to_string().starts_with("cannot write /nowhere/at-all.csv: "));
}

#[test]
fn nonsensical_flags_are_refused() {
    for flags in [
        ["--rate", "0"],
        ["--rate", "NaN"],
        ["--hot", "2"],
        ["--replicas", "0"],
        ["--replicas", "65"],
        ["--policies", "best"],
        ["--delay=-1", "--hot=0"],
        ["--step", "0"],
        ["--context", "inf"],
        ["--requests", "0"],
        ["--job", "0.5"],
        ["--load=-1", "--hot=0"],
    ] {
        assert!(Program::try_parse_from(["program", flags[0], flags[1]]).is_err(), "{flags:?}");
    }
}
