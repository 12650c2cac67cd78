//! `hostler init` and `hostler token`: the fleet's authority, and the tokens by which nodes join.
//!
//! They change the authority's folder, which the routers read whenever a node joins. `user_files`
//! makes everything else that `init` makes.

mod sites;
mod user_files;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context;
use clap::{Args, Subcommand};
use hostler_tls::{Authority, JoinToken, TokenInfo, TokenScope, TokenStore, UseLimit, write_private};

pub(crate) use self::user_files::ensure_user_key;
use crate::output::{Side, complain, say, table};
use crate::secret_output::warn_of_readers;
use crate::settings::tls_dir;

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Make only an authority, in this folder, and a first token.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The cluster whose jobs are to serve: a name of which `list` shows all, or a file with a
    /// `[cluster]` section. Without it, one for the scheduler whose commands this host has.
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "dir")]
    site: Option<String>,
    /// What the fleet is called; it stands in its nodes' certificates.
    #[arg(long, default_value = "hostler", value_name = "FLEET")]
    name: String,
    /// Have this host start the fleet's controller again after a restart or a kill, by a timer of
    /// your systemd or a line of your crontab.
    #[arg(long, conflicts_with = "dir")]
    service: bool,
    /// Have the edge of your fleet's router listen for other hosts too, with TLS and keys, so that
    /// colleagues use the fleet: `hostler keys create --invite` invites them.
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "8443", value_parser = clap::value_parser!(u16).range(1..), conflicts_with = "dir")]
    share: Option<u16>,
    #[command(flatten)]
    token: TokenArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a join token. It is printed to standard output, this once: the folder keeps only its
    /// SHA-256.
    Create(CreateTokenArgs),
    /// Show the tokens, without what is secret of them.
    List(ListTokensArgs),
    /// Take a token back: nobody joins by it any more, and nodes that did get no further
    /// certificate.
    Revoke(RevokeTokenArgs),
}

#[derive(Debug, Args)]
struct AuthorityFolderArgs {
    /// The folder of the fleet's authority; without it `router.tls_dir` of the configuration, else
    /// `~/.config/hostler/fleet`.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CreateTokenArgs {
    #[command(flatten)]
    folder: AuthorityFolderArgs,
    #[command(flatten)]
    token: TokenArgs,
}

#[derive(Debug, Args)]
struct TokenArgs {
    /// How long nodes may join by it, such as 24h; who has joined stays.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "24h", value_name = "DURATION")]
    expires: Duration,
    /// The scheduler's job whose nodes may join by it: what its agents find in PBS_JOBID,
    /// SLURM_ARRAY_JOB_ID or SLURM_JOB_ID. An array's `1234[].server` means all of its parts.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ID")]
    job: String,
    /// How many nodes may join by it, or `unlimited` with --job [default: 1, with --job unlimited]
    #[arg(long, value_name = "N")]
    uses: Option<UsesArg>,
    /// The one node that may join by it, under this name, with a new key too: for a node that was
    /// set up anew, whose old key is no good then.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME", conflicts_with = "uses")]
    node: String,
    /// Write it into this file, readable by you alone, instead of printing it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl TokenArgs {
    /// Whether any argument asks for a token.
    fn is_wanted(&self) -> bool {
        self.out.is_some() || self.uses.is_some() || !self.job.is_empty() || !self.node.is_empty()
    }
}

#[derive(Debug, Clone, Copy)]
struct UsesArg(UseLimit);

impl FromStr for UsesArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "unlimited" => Ok(Self(UseLimit::EveryNodeOfItsJob)),
            number => number.parse().map(|uses| Self(UseLimit::Count(uses))).map_err(|_| "a number was expected, or `unlimited`".into()),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ListTokensArgs {
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: AuthorityFolderArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeTokenArgs {
    /// The token's id, as `hostler token list` shows it; never the token itself.
    id: String,
    #[command(flatten)]
    folder: AuthorityFolderArgs,
}

pub(crate) async fn init(args: &InitArgs, config: Option<&Path>) -> anyhow::Result<()> {
    if args.site.as_deref() == Some("list") {
        sites::lines().iter().for_each(|line| say(line));
        return Ok(());
    }
    let Some(folder) = &args.dir else { return user_files::make_missing(args, config).await };
    let authority = Authority::create(folder, &args.name)?;
    complain(&format!("fleet        {}", authority.fleet()));
    complain(&format!("authority    {} (ca.key in it is the fleet: keep it private; its routers share it)", folder.display()));
    complain(&format!("fingerprint  {}", authority.fingerprint()));
    complain(&format!("routers      hostler router --tls-dir {} --agents-listen 0.0.0.0:8001", folder.display()));
    create_token(&authority, folder, &args.token)
}

pub(crate) fn token(command: &TokenCommand, config: Option<&Path>) -> anyhow::Result<()> {
    match command {
        TokenCommand::Create(args) => {
            let folder = authority_folder(&args.folder, config)?;
            create_token(&Authority::load(&folder)?, &folder, &args.token)
        }
        TokenCommand::List(args) => {
            let records = TokenStore::in_folder(&authority_folder(&args.folder, config)?).list()?;
            if args.json {
                say(&serde_json::to_string_pretty(&records)?);
            } else {
                lines(&records, hostler_tls::now()).iter().for_each(|line| say(line));
            }
            Ok(())
        }
        TokenCommand::Revoke(args) => {
            let folder = authority_folder(&args.folder, config)?;
            anyhow::ensure!(
                TokenStore::in_folder(&folder).revoke(&args.id)?,
                "{} has no token {:?}: `hostler token list` shows them",
                folder.display(),
                args.id
            );
            say(&format!("token {} is revoked; nodes that joined by it leave when their certificates expire", args.id));
            Ok(())
        }
    }
}

fn authority_folder(args: &AuthorityFolderArgs, config: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(folder) = &args.dir {
        return Ok(folder.clone());
    }
    let configured = tls_dir(config)?;
    if !configured.as_os_str().is_empty() {
        return Ok(configured);
    }
    let base = hostler_boot::home::config_dir();
    Ok(base.context("there is no home folder to keep the fleet's authority in: name a folder with --dir DIR")?.join("hostler/fleet"))
}

fn create_token(authority: &Authority, folder: &Path, args: &TokenArgs) -> anyhow::Result<()> {
    let default = if args.job.is_empty() || !args.node.is_empty() { UseLimit::Count(1) } else { UseLimit::EveryNodeOfItsJob };
    let uses = args.uses.map_or(default, |uses| uses.0);
    let scope = TokenScope { expires_in: args.expires, job: args.job.clone(), uses, node: args.node.clone() };
    let token = TokenStore::in_folder(folder).create(authority, &scope, hostler_tls::now())?;
    complain(&format!("token        {}, {}, expires in {}", token.id, format_use_limit(&scope), humantime::format_duration(args.expires)));
    write_token(&token, args.out.as_deref())
}

fn write_token(token: &JoinToken, out: Option<&Path>) -> anyhow::Result<()> {
    match out {
        Some(file) => {
            write_private(file, format!("{}\n", token.text()).as_bytes())?;
            complain(&format!("agents       hostler agent --join-token-file {} --router HOST:8001", file.display()));
        }
        None => {
            complain(
                "agents       put the next line into a file that only they can read, and name it: hostler agent --join-token-file FILE --router HOST:8001",
            );
            warn_of_readers();
            say(&token.text());
        }
    }
    Ok(())
}

fn format_use_limit(scope: &TokenScope) -> String {
    match scope.uses {
        UseLimit::Count(_) if !scope.node.is_empty() => format!("for node {}", scope.node),
        UseLimit::Count(1) => "for one node (`hostler token create --uses N` for more)".into(),
        UseLimit::Count(uses) => format!("for {uses} nodes"),
        UseLimit::EveryNodeOfItsJob => format!("for every node of job {}", scope.job),
    }
}

fn lines(records: &[TokenInfo], now: u64) -> Vec<String> {
    let heading = ["TOKEN", "STATE", "EXPIRES", "JOB", "NODE", "USED", "BY"].map(str::to_owned);
    let row = |record: &TokenInfo| {
        let state = match record {
            TokenInfo { revoked: true, .. } => "revoked",
            TokenInfo { expires, .. } if *expires <= now => "expired",
            TokenInfo { uses, used_by, .. } if *uses > 0 && used_by.len() >= *uses as usize => "used up",
            _ => "good",
        };
        let expires = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(record.expires)).to_string();
        let used = if record.uses == 0 { "not counted".to_owned() } else { format!("{}/{}", record.used_by.len(), record.uses) };
        [record.id.clone(), state.to_owned(), expires, record.job.clone(), record.node.clone(), used, record.used_by.join(", ")]
    };
    let rows: Vec<_> = std::iter::once(heading).chain(records.iter().map(row)).collect();
    table([Side::Left; 7], &rows)
}

#[cfg(test)]
mod tests;
