//! `hostler report`: an archive for a bug report, without secrets. It shows the content, and asks
//! before it writes.

mod archive;
mod gather;
mod metrics_page;
mod redaction;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context, bail};
use clap::Args;
use hostler_boot::Settings;

use self::archive::{ReportFile, write_archive};
use self::gather::{Gathered, gather};
use self::redaction::Redaction;
use crate::admin::AdminArgs;
use crate::host_names::this_host;
use crate::output::{Side, complain, say, table};
use crate::settings::environment;

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// The archive; without it `hostler-report-HOST-TIME.tar.gz` in this folder.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write it without asking.
    #[arg(short, long)]
    yes: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn report(settings: &Settings, args: &ReportArgs) -> anyhow::Result<()> {
    if !args.yes && !std::io::stdin().is_terminal() {
        bail!("nobody can be asked here: look at what `hostler report` shows in a terminal, or say --yes");
    }
    complain("asking the host and the router");
    let Gathered { files, mut missing } = gather(settings, &args.admin).await;
    let redaction = Redaction::new(environment());
    let redacted: Vec<(ReportFile, usize)> = files.into_iter().map(|file| redact(&redaction, file)).collect();
    missing = missing.iter().map(|reason| redaction.apply(reason).0).collect();
    describe_contents(&redacted, &missing).iter().for_each(|line| say(line));
    let name = archive_name();
    let path = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    if !args.yes && !confirm(&format!("write these to {}?", path.display()))? {
        say("nothing was written");
        return Ok(());
    }
    let mut files: Vec<ReportFile> = redacted.into_iter().map(|(file, _)| file).collect();
    if !missing.is_empty() {
        files.push(ReportFile { name: "missing.txt".into(), content: missing.join("\n") + "\n" });
    }
    write_archive(&path, &name, &files)?;
    say(&format!("written   {}: read it before you send it", path.display()));
    Ok(())
}

fn redact(redaction: &Redaction, file: ReportFile) -> (ReportFile, usize) {
    let (content, removed) = redaction.apply(&file.content);
    (ReportFile { content, ..file }, removed)
}

/// Describes the archive's content, a line for each file.
fn describe_contents(files: &[(ReportFile, usize)], missing: &[String]) -> Vec<String> {
    let row = |(file, removed): &(ReportFile, usize)| {
        let lines = file.content.lines().count();
        let removed = if *removed > 0 { format!("{removed} removed") } else { String::new() };
        [file.name.clone(), lines.to_string(), file.content.len().to_string(), removed]
    };
    let head = ["FILE", "LINES", "BYTES", "SECRETS"].map(String::from);
    let rows: Vec<[String; 4]> = std::iter::once(head).chain(files.iter().map(row)).collect();
    let mut lines = table([Side::Left, Side::Right, Side::Right, Side::Left], &rows);
    lines.extend(missing.iter().map(|reason| format!("missing   {reason}")));
    if files.iter().any(|(file, _)| file.name.starts_with("logs/")) {
        lines.push("note      an engine's log has prompts where it was told to log requests".into());
    }
    lines
}

/// The host, and the time without colons, which some systems forbid in file names.
fn archive_name() -> String {
    let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string().replace(':', "");
    format!("hostler-report-{}-{time}", this_host())
}

fn confirm(question: &str) -> anyhow::Result<bool> {
    write!(std::io::stderr(), "{question} [y/N] ").context("nobody can be asked")?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_lists_contents_removals_and_missing_files() {
        let file = |name: &str, content: &str| ReportFile { name: name.into(), content: content.into() };
        let files = [(file("settings.txt", "a = 1\n"), 0), (file("logs/n1-0.log", "one\ntwo\n"), 2)];
        insta::assert_snapshot!(describe_contents(&files, &["plan.txt: no vllm".into()]).join("\n"), @"
        FILE           LINES  BYTES  SECRETS
        settings.txt       1      6
        logs/n1-0.log      2      8  2 removed
        missing   plan.txt: no vllm
        note      an engine's log has prompts where it was told to log requests
        ");
    }
}
