//! `hostler plan`: what the agent would run on this host, or on a described one, and why. Starts
//! nothing.

use anyhow::{Context, bail, ensure};
use clap::Args;
use hostler_agent::plan::described_gpus::parse_gpus;
use hostler_agent::plan::{ModelInfo, PreviewRequest, preview};
use hostler_agent::vllm::VllmVersion;
use hostler_agent::{AgentConfig, check_spread};
use hostler_boot::Settings;

use crate::output::say;
use crate::settings::EngineArgs;

/// The options of `hostler plan`, beside the agent's settings.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The model: a folder, or a name on Hugging Face.
    #[arg(id = "MODEL", conflicts_with = "model")]
    pub(crate) model: Option<String>,
    /// GPUs of this host, such as `0,1`, as `hostler up --gpus` takes them; or a description of
    /// another's: `4x80` is four of 80 GiB, `2x3g.40gb` two MIG slices, and commas separate kinds.
    /// With `--nodes-per-replica` these are the GPUs of each node.
    #[arg(long = "gpus", value_name = "LIST|COUNTxSIZE")]
    gpus: Option<String>,
    /// The GPUs of `--gpus` are joined by NVLink: all of a kind, or in groups of so many.
    #[arg(long, value_name = "GROUP", num_args = 0..=1, require_equals = true, default_missing_value = "64", requires = "gpus")]
    nvlink: Option<u32>,
    /// Plan for this release of vLLM instead of the installed one.
    #[arg(long, value_name = "VERSION")]
    vllm_version: Option<String>,
    /// Print it for a program.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// Prints the plan; fails with the arithmetic if the model does not fit.
pub(crate) async fn plan(settings: &Settings, args: &PlanArgs) -> anyhow::Result<()> {
    let mut config: AgentConfig = settings.section("agent")?;
    if let Some(model) = &args.model {
        config.model.clone_from(model);
    }
    check_spread(&config)?;
    ensure!(
        config.attach.is_empty(),
        "engines of --attach run already and keep their flags, so there is nothing to plan: leave --attach out"
    );
    let described = match &args.gpus {
        Some(list) if is_list(list) => {
            ensure!(args.nvlink.is_none(), "--nvlink describes other GPUs than this host's: --gpus 4x80 --nvlink");
            config.gpus.clone_from(list);
            None
        }
        Some(text) => Some(parse_gpus(text, args.nvlink.unwrap_or(0)).context("--gpus")?),
        None => None,
    };
    let release =
        |text: &String| VllmVersion::parse(text).with_context(|| format!("--vllm-version {text:?} is no version, such as 0.32.0"));
    let version = args.vllm_version.as_ref().map(release).transpose()?;
    let leaving = hostler_agent::describe_leaving(&config);
    let (name, chosen_gpus) = (config.model.clone(), config.tp);
    let preview = preview(config, PreviewRequest { described_gpus: described, version }).await?;
    // The simulated engine needs no facts of its model.
    let is_guess = chosen_gpus == 0 && !preview.plan.setup.simulated && preview.plan.model.facts().is_none();
    if args.json {
        let mut document = preview.plan.json();
        document["supposes"] = preview.assumptions.into();
        document["leaving"] = leaving.into();
        say(&serde_json::to_string_pretty(&document)?);
        return check_computed(is_guess, &name, &preview.plan.model);
    }
    check_computed(is_guess, &name, &preview.plan.model)?;
    say(&preview.plan.page());
    for (at, sentence) in leaving.iter().enumerate() {
        say(&format!("{:<11}{sentence}", if at == 0 { "leaving" } else { "" }));
    }
    for sentence in preview.assumptions {
        say(&format!("note       {sentence}"));
    }
    Ok(())
}

/// A plan that knows nothing of its model is no plan, for scripts either.
fn check_computed(is_guess: bool, name: &str, model: &ModelInfo) -> anyhow::Result<()> {
    match model {
        ModelInfo::Unknown { because } if is_guess => bail!("nothing could be computed for {name}: {because}"),
        _ => Ok(()),
    }
}

/// Whether these are GPUs of this host, by number or UUID. Every description has an x.
fn is_list(gpus: &str) -> bool {
    !gpus.contains(['x', 'X'])
}
