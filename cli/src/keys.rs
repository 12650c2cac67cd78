//! `hostler keys create`, `list` and `revoke`: who may send requests. They change the key file;
//! routers that use it notice within a second.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use hostler_router::keys::{KeyEntry, KeyLimits, KeyStatus, Role, Secret, Timestamp, change, find_key_id, list as entries};

use crate::env::{ClientAccess, access_of_others};
use crate::output::{Side, complain, say, table};
use crate::secret_output::SecretOutput;
use crate::settings::keys_file;

#[derive(Debug, Subcommand)]
pub(crate) enum Keys {
    /// Make a key. It is written to --out FILE or to standard output, this once: the key file keeps
    /// only its SHA-256.
    Create(Box<CreateKeyArgs>),
    /// Show the keys, without what is secret of them.
    List(ListKeysArgs),
    /// End a key's validity, now or some time from now; requests that run go on.
    Revoke(RevokeKeyArgs),
}

#[derive(Debug, Args)]
struct FileArgs {
    /// The key file; without it `router.keys_file` of the configuration, else
    /// `~/.config/hostler/keys.toml`.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CreateKeyArgs {
    /// What you call it. Several keys may have one name, as two do while one replaces the other.
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Whom it shares limits and its turn with; by default its name, or else its id.
    #[arg(long)]
    tenant: Option<String>,
    /// What it is good for.
    #[arg(long, value_enum, default_value = "use")]
    role: RoleArg,
    /// A model that it may ask for, LoRA adapters and aliases by their own names; may be repeated,
    /// and without it all are allowed.
    #[arg(long = "model", value_name = "MODEL")]
    models: Vec<String>,
    /// How long it is valid, such as 90d; without it, until it is revoked.
    #[arg(long, value_parser = humantime::parse_duration, value_name = "DURATION")]
    expires: Option<Duration>,
    /// Write it into this file, which only you can read, instead of printing it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write all that a colleague needs into this file, which only you can read: key, address and
    /// certificate of your fleet. `eval "$(hostler env --access FILE)"` reads it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["out", "file"])]
    invite: Option<PathBuf>,
    /// Replace what is in the file of --out or --invite.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    file: FileArgs,
}

/// How much it may use; what is left out is unbounded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Most requests in flight at once.
    #[arg(long, value_name = "N")]
    in_flight: Option<u32>,
    /// Most requests begun in a minute.
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<u64>,
    /// Most prompt tokens in a minute.
    #[arg(long, value_name = "TOKENS")]
    input_per_minute: Option<u64>,
    /// Most prompt tokens in a day.
    #[arg(long, value_name = "TOKENS")]
    input_per_day: Option<u64>,
    /// Most generated tokens in a minute.
    #[arg(long, value_name = "TOKENS")]
    output_per_minute: Option<u64>,
    /// Most generated tokens in a day.
    #[arg(long, value_name = "TOKENS")]
    output_per_day: Option<u64>,
    /// Its tenant's share beside others' when the fleet is full; 1 without it.
    #[arg(long, value_name = "X")]
    weight: Option<f64>,
}

/// `Role`, for the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Sending requests.
    Use,
    /// That, and the operators' subcommands (`hostler ps`, `drain` and the like).
    Admin,
}

#[derive(Debug, Args)]
pub(crate) struct ListKeysArgs {
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    file: FileArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeKeyArgs {
    /// The key's id, as `hostler keys list` shows it; never the key itself.
    id: String,
    /// Leave it valid for this long, such as 24h, so that its users can change to another key
    /// meanwhile.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "0s", hide_default_value = true, value_name = "DURATION")]
    after: Duration,
    #[command(flatten)]
    file: FileArgs,
}

pub(crate) async fn keys(command: &Keys, config: Option<&Path>) -> anyhow::Result<()> {
    match command {
        Keys::Create(args) => create(args, config).await,
        Keys::List(args) => {
            let entries = entries(&locate_key_file(&args.file, config)?.path)?;
            let now = SystemTime::now();
            if args.json {
                say(&serde_json::to_string_pretty(&json(&entries, now))?);
            } else {
                lines(&entries, now).iter().for_each(|line| say(line));
            }
            Ok(())
        }
        Keys::Revoke(args) => {
            let now = SystemTime::now();
            let (id, after) = (args.id.as_str(), args.after);
            let message = change(&locate_key_file(&args.file, config)?.path, false, |entries| revoke(entries, id, now, after))?;
            say(&message);
            Ok(())
        }
    }
}

/// Key file to use, and whether a router with this configuration reads it.
struct KeyFileLocation {
    path: PathBuf,
    is_read: bool,
    /// Whether it is that of `hostler up --api-key` where the configuration names none.
    is_default: bool,
}

fn locate_key_file(args: &FileArgs, config: Option<&Path>) -> anyhow::Result<KeyFileLocation> {
    let configured = keys_file(config)?;
    let own = hostler_boot::home::config_dir().map(|folder| folder.join("hostler/keys.toml"));
    let path = match &args.file {
        Some(file) => file.clone(),
        None if !configured.as_os_str().is_empty() => configured.clone(),
        None => own.clone().context("there is no home folder to keep keys in: name the key file with --file FILE")?,
    };
    let is_default = configured.as_os_str().is_empty() && own.as_ref() == Some(&path);
    Ok(KeyFileLocation { is_read: path == configured, is_default, path })
}

async fn create(args: &CreateKeyArgs, config: Option<&Path>) -> anyhow::Result<()> {
    let access = if args.invite.is_some() { Some(access_of_others(config).await?) } else { None };
    let out = args.out.as_ref().or(args.invite.as_ref());
    let KeyFileLocation { path, is_read, is_default } = locate_key_file(&args.file, config)?;
    let now = SystemTime::now();
    let output = SecretOutput::prepare(out.map(PathBuf::as_path), args.force)?;
    let changed = change(&path, true, |entries| {
        let secret = unused_secret(entries).map_err(|error| format!("the system gives no random numbers: {error}"))?;
        let entry = entry(args, &secret, now);
        entries.push(entry.clone());
        Ok((secret, entry))
    });
    let (secret, made) = changed.inspect_err(|_| output.withdraw())?;
    let text = match access {
        Some(access) => serde_json::to_string(&ClientAccess { api_key: secret.reveal().to_owned(), ..access })?,
        None => secret.reveal().to_owned(),
    };
    let written = output.write(&text);
    written.with_context(|| format!("the key {0} was made but cannot be written: revoke it with `hostler keys revoke {0}`", made.id))?;
    let until = made.expires.map(|expires| format!(", valid until {}", String::from(expires))).unwrap_or_default();
    let kept = match out {
        Some(file) if args.invite.is_some() => {
            format!("give {} to its user alone, for `hostler env --access FILE`", file.display())
        }
        Some(file) => format!("the key itself is in {}, which only you can read", file.display()),
        None => "keep the line above, it is not shown again".to_owned(),
    };
    complain(&format!("key {} of tenant {} is in {}{until}; {kept}", made.id, made.tenant, path.display()));
    if !is_read {
        complain(&format!(
            "a router takes it, within two seconds, if it was started with --keys-file {} (setting router.keys_file){}",
            path.display(),
            if is_default { ", or by `hostler up --api-key`" } else { "" }
        ));
    }
    Ok(())
}

/// A key with an unused id.
fn unused_secret(entries: &[KeyEntry]) -> std::io::Result<Secret> {
    loop {
        let secret = Secret::random()?;
        if entries.iter().all(|entry| entry.id != secret.id()) {
            return Ok(secret);
        }
    }
}

fn entry(args: &CreateKeyArgs, secret: &Secret, now: SystemTime) -> KeyEntry {
    let LimitArgs { in_flight, requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day, weight } =
        args.limits;
    let name = Some(args.name.clone()).filter(|name| !name.is_empty());
    let tenant = args.tenant.clone().or(name).unwrap_or_else(|| secret.id().to_owned());
    KeyEntry {
        name: args.name.clone(),
        role: match args.role {
            RoleArg::Use => Role::Use,
            RoleArg::Admin => Role::Admin,
        },
        expires: args.expires.map(|span| Timestamp::after(now, span)),
        models: Some(args.models.clone()).filter(|models| !models.is_empty()),
        limits: KeyLimits { in_flight, requests_per_minute, input_per_minute, input_per_day, output_per_minute, output_per_day, weight },
        ..KeyEntry::new(secret, &tenant, now)
    }
}

/// Ends a key's validity, and returns from when on. A revocation is never undone, because the key
/// may have been lost.
fn revoke(entries: &mut [KeyEntry], id: &str, now: SystemTime, after: Duration) -> Result<String, String> {
    if let Some(id) = find_key_id(id) {
        return Err(format!("this is a whole key, which does not belong on a command line: name it by its id, `hostler keys revoke {id}`"));
    }
    let named: Vec<&str> = entries.iter().filter(|entry| entry.name == id && !id.is_empty()).map(|entry| entry.id.as_str()).collect();
    let hint =
        if named.is_empty() { "`hostler keys list` shows them all".to_owned() } else { format!("keys of that name: {}", named.join(", ")) };
    let entry = entries.iter_mut().find(|entry| entry.id == id).ok_or_else(|| format!("no key has the id {id:?}; {hint}"))?;
    let revoked_at = Timestamp::after(now, after);
    if let Some(before) = entry.revoked.filter(|before| *before <= revoked_at) {
        return Ok(format!("{id} was revoked before, from {} on", String::from(before)));
    }
    entry.revoked = Some(revoked_at);
    Ok(if after.is_zero() { format!("{id} is revoked") } else { format!("{id} is valid until {}", String::from(revoked_at)) })
}

/// Whether a key is valid and until when, in words.
fn format_validity(entry: &KeyEntry, now: SystemTime) -> String {
    let end = entry.revoked.into_iter().chain(entry.expires).min().map(String::from);
    match (entry.status(now), end) {
        (KeyStatus::Valid, None) => "valid".to_owned(),
        (KeyStatus::Valid, Some(end)) => format!("valid until {end}"),
        (KeyStatus::Expired, _) => "expired".to_owned(),
        (KeyStatus::Revoked, _) => "revoked".to_owned(),
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Use => "use",
        Role::Admin => "admin",
    }
}

fn format_limits(limits: &KeyLimits) -> String {
    let Ok(serde_json::Value::Object(bounds)) = serde_json::to_value(limits) else { return String::new() };
    bounds.iter().map(|(name, bound)| format!("{}={bound}", name.replace('_', "-"))).collect::<Vec<_>>().join(" ")
}

fn lines(entries: &[KeyEntry], now: SystemTime) -> Vec<String> {
    if entries.is_empty() {
        return vec!["there are no keys yet, so nobody gets in: `hostler keys create` makes one".to_owned()];
    }
    let head = ["ID", "NAME", "TENANT", "ROLE", "CREATED", "STATE", "MODELS", "LIMITS"].map(str::to_owned);
    let rows = entries.iter().map(|entry| {
        let models = entry.models.as_ref().map_or("all".to_owned(), |models| models.join(" "));
        let created = String::from(entry.created);
        let (name, tenant, role) = (entry.name.clone(), entry.tenant.clone(), role_name(entry.role).to_owned());
        [entry.id.clone(), name, tenant, role, created, format_validity(entry, now), models, format_limits(&entry.limits)]
    });
    table([Side::Left; 8], &[head].into_iter().chain(rows).collect::<Vec<_>>())
}

fn json(entries: &[KeyEntry], now: SystemTime) -> serde_json::Value {
    let keys = entries.iter().map(|entry| {
        let state = match entry.status(now) {
            KeyStatus::Valid => "valid",
            KeyStatus::Expired => "expired",
            KeyStatus::Revoked => "revoked",
        };
        serde_json::json!({
            "id": entry.id, "name": entry.name, "tenant": entry.tenant, "role": entry.role, "state": state, "created": entry.created,
            "expires": entry.expires, "revoked": entry.revoked, "models": entry.models, "limits": entry.limits,
        })
    });
    serde_json::json!({ "keys": keys.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests;
