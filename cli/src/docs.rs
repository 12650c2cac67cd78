//! `hostler docs`: the parts of the manual that come from the program itself.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Subcommand;
use hostler_agent::AgentMetrics;
use hostler_boot::metrics::{MetricDescription, MetricRegistry};

use crate::output::say;
use crate::settings;

/// Which part.
#[derive(Debug, Subcommand)]
pub(crate) enum Docs {
    /// `docs/config.md`: every setting.
    Config,
    /// `deploy/config/full.toml`: every key at its default.
    Example,
    /// `deploy/config/hostler.schema.json`: a JSON Schema of the settings file, for editors.
    Schema,
    /// `docs/metrics.md`: every metric.
    Metrics,
    /// Man pages, one for each subcommand, which `man -l FILE` shows.
    Man {
        /// The folder to write them to, such as ~/.local/share/man/man1.
        folder: PathBuf,
    },
}

/// Prints a part, or writes it.
pub(crate) fn print(docs: &Docs, command: clap::Command) -> anyhow::Result<()> {
    let text = match docs {
        Docs::Man { folder } => {
            fs::create_dir_all(folder)
                .and_then(|()| clap_mangen::generate_to(command, folder))
                .with_context(|| format!("cannot write the man pages to {}", folder.display()))?;
            return Ok(());
        }
        Docs::Config => hostler_boot::config::markdown(&settings::all()),
        Docs::Example => hostler_boot::config::example_file(&settings::all()),
        Docs::Schema => hostler_boot::config::json_schema(&settings::all()),
        Docs::Metrics => metrics(),
    };
    say(text.trim_end());
    Ok(())
}

fn metrics() -> String {
    let mut page = String::from(
        "# Metrics\n\nGenerated from the program by `hostler docs metrics`; a test compares them.\n\n\
         The pages are OpenMetrics 1.0.0.\n",
    );
    let router = hostler_router::describe_metrics();
    let mut agent = MetricRegistry::default();
    AgentMetrics::register(&mut agent);
    table(&mut page, "Router: `/metrics` on its admin listener", router.descriptions());
    table(&mut page, "Agent: `/metrics` on its admin socket, or on `agent.agent_admin`", agent.descriptions());
    page
}

fn table(page: &mut String, title: &str, described: &[MetricDescription]) {
    let _ = write!(page, "\n## {title}\n\n| Name | Kind | Labels | Meaning |\n| --- | --- | --- | --- |\n");
    for MetricDescription { name, kind, labels, help } in described {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(page, "| `{name}` | {} | {} | {help} |", kind.as_str(), labels.join(", "));
    }
}
