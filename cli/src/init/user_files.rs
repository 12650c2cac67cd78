//! Files of a user's fleet, beside their configuration file: authority, edge's certificate, key
//! file, key and settings. `hostler init` makes missing files and changes no existing ones.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use hostler_controller::{ClusterConfig, FleetFolder};
use hostler_router::RouterConfig;
use hostler_router::keys::{KeyEntry, Secret, change, list, read_private};
use hostler_scheduler::NoScheduler;
use hostler_tls::{Authority, write_new, write_private};

use super::{InitArgs, create_token, sites};
use crate::controller_service::make_service;
use crate::host_names::{certified_names, find_host_names};
use crate::output::say;
use crate::settings;

/// Name of the user's own key in the key file.
const USER: &str = "user";

/// Name of the settings' JSON Schema, beside them.
const SCHEMA: &str = "hostler.schema.json";

/// Paths of all files.
struct UserFiles {
    settings: PathBuf,
    authority: PathBuf,
    certificate: PathBuf,
    certificate_key: PathBuf,
    keys: PathBuf,
    user_key: PathBuf,
}

impl UserFiles {
    /// Paths from the settings, else beside them.
    fn locate(settings: PathBuf, router: &RouterConfig) -> Self {
        let beside = |name: &str| settings.with_file_name(name);
        let set_or = |set: &Path, name: &str| if set.as_os_str().is_empty() { beside(name) } else { set.to_owned() };
        let keys = set_or(&router.keys_file, "keys.toml");
        Self {
            authority: set_or(&router.tls_dir, "fleet"),
            certificate: set_or(&router.tls_cert, "edge.pem"),
            certificate_key: set_or(&router.tls_key, "edge.key"),
            user_key: settings::user_key_file(&keys),
            keys,
            settings,
        }
    }
}

/// Makes missing files, and says of each whether it was missing.
pub(super) async fn make_missing(args: &InitArgs, config: Option<&Path>) -> anyhow::Result<()> {
    let file = config.map(Path::to_owned).or_else(settings::own_config_file);
    let file = file.context("there is no home folder to keep a fleet's files in: name a configuration file with --config FILE")?;
    let file = std::path::absolute(&file).with_context(|| format!("cannot find {}", file.display()))?;
    let existing = Some(file.as_path()).filter(|file| file.exists());
    let router = settings::router_config(existing)?;
    let site = args.site.as_deref().map(sites::read).transpose()?;
    let files = UserFiles::locate(file.clone(), &router);
    let folder = file.parent().unwrap_or(Path::new("/"));
    make_folder(folder)?;

    let authority = ensure_authority(&files, &args.name)?;
    if router.tls_cert.as_os_str().is_empty() {
        ensure_certificate(&files, &authority).await?;
    }
    let made = ensure_key(&files.keys, &files.user_key)?;
    tell("keys", made.entry, &files.keys);
    tell("your key", made.key, &files.user_key);
    if args.token.is_wanted() {
        match args.token.out.as_deref().filter(|out| out.exists()) {
            Some(out) => tell("token", false, out),
            None => create_token(&authority, &files.authority, &args.token)?,
        }
    }
    // Editors read it; the settings' first line names it. Another release has other settings.
    write_private(&files.settings.with_file_name(SCHEMA), hostler_boot::config::json_schema(&settings::all()).as_bytes())?;
    match existing {
        Some(existing) => {
            tell("settings", false, existing);
            let lines = missing_lines(&files, (&router, args.share), &settings::cluster_config(Some(existing))?, site.as_deref());
            if !lines.is_empty() {
                say(&format!(
                    "to add      these lines to {}, which init does not change, below a section that is there already:\n\n{}",
                    existing.display(),
                    lines.trim_end()
                ));
            }
        }
        None => {
            let site = site.map_or_else(sites::read_of_host, Ok);
            write_new(&files.settings, settings_text(&files, args.share, site.as_deref().ok()).as_bytes())?;
            tell("settings", true, &files.settings);
            say(match site {
                Ok(_) => "next        fill in [cluster] of the settings, then `hostler doctor`",
                Err(NoScheduler::Ambiguous) => {
                    "next        this host has the commands of PBS and of Slurm: `hostler init --site list` shows the clusters whose [cluster] section to add"
                }
                Err(NoScheduler::Absent { .. }) => {
                    "next        no scheduler was found here: `hostler init --site list` shows the clusters whose [cluster] section to add"
                }
            });
        }
    }
    if args.service {
        let fleet = FleetFolder::open(&settings::cluster_config(Some(&files.settings))?)?;
        make_service(&fleet, &files.settings).await?;
    }
    Ok(())
}

fn tell(what: &str, is_made: bool, path: &Path) {
    say(&format!("{what:<12}{:<7}{}", if is_made { "made" } else { "there" }, path.display()));
}

fn ensure_authority(files: &UserFiles, name: &str) -> anyhow::Result<Authority> {
    // `ca.crt` is written last.
    let is_there = files.authority.join("ca.crt").exists();
    let authority = if is_there { Authority::load(&files.authority) } else { Authority::create(&files.authority, name) }?;
    tell("authority", !is_there, &files.authority);
    Ok(authority)
}

async fn ensure_certificate(files: &UserFiles, authority: &Authority) -> anyhow::Result<()> {
    let is_there = files.certificate.exists() && files.certificate_key.exists();
    if !is_there {
        let made = authority.issue_edge(&certified_names(&find_host_names().await))?;
        write_private(&files.certificate_key, made.key.as_bytes())?;
        write_private(&files.certificate, made.certificate.as_bytes())?;
    }
    tell("certificate", !is_there, &files.certificate);
    Ok(())
}

/// What of a user's key was missing.
struct MadeKey {
    entry: bool,
    key: bool,
}

/// Makes the user's key, and adds it to the key file.
fn ensure_key(keys: &Path, user_key: &Path) -> anyhow::Result<MadeKey> {
    let is_there = user_key.exists();
    let secret: Secret = if is_there {
        let text = read_private(user_key)?;
        text.trim().parse().with_context(|| format!("{} holds no key: move it away, and another is made", user_key.display()))?
    } else {
        Secret::random().context("the system gives no random numbers")?
    };
    let is_known = keys.exists() && list(keys)?.iter().any(|entry| entry.id == secret.id());
    if !is_known {
        change(keys, true, |entries| {
            entries.push(KeyEntry { name: USER.to_owned(), ..KeyEntry::new(&secret, USER, SystemTime::now()) });
            Ok(())
        })?;
    }
    if !is_there {
        // An entry whose key nobody has does no harm.
        write_new(user_key, format!("{}\n", secret.reveal()).as_bytes())?;
    }
    Ok(MadeKey { entry: !is_known, key: !is_there })
}

/// Makes the user's key where it is missing, for a router that is to want keys. Returns the key
/// file: the configured one, else that of `init`.
///
/// # Errors
/// When there is no folder for it, or a file of that name holds something else.
pub(crate) fn ensure_user_key(configured: &Path) -> anyhow::Result<PathBuf> {
    let keys = match Some(configured).filter(|path| !path.as_os_str().is_empty()) {
        Some(path) => path.to_owned(),
        None => {
            let settings = settings::own_config_file();
            settings.context("there is no home folder to keep keys in: name a key file with --keys-file FILE")?.with_file_name("keys.toml")
        }
    };
    make_folder(keys.parent().unwrap_or(Path::new("/")))?;
    let user_key = settings::user_key_file(&keys);
    if ensure_key(&keys, &user_key)?.key {
        tell("your key", true, &user_key);
    }
    Ok(keys)
}

fn make_folder(folder: &Path) -> anyhow::Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.with_context(|| format!("cannot make {}", folder.display()))
}

fn settings_text(files: &UserFiles, share: Option<u16>, site: Option<&str>) -> String {
    let (authority, keys) = (quote(&files.authority), quote(&files.keys));
    let (certificate, key) = (quote(&files.certificate), quote(&files.certificate_key));
    let trusted = files.authority.join("ca.crt");
    let mut text = format!(
        "#:schema ./{SCHEMA}\n\
         # Settings of Hostler, made by `hostler init`. docs/config.md has them all, and `hostler check` reads this file.\n\n\
         [router]\n\
         tls_dir = {authority}\n\
         keys_file = {keys}\n\
         # An edge that other hosts reach; its clients trust {}.\n\
         {}\n\
         # tls_cert = {certificate}\n\
         # tls_key = {key}\n",
        trusted.display(),
        share.map_or_else(|| "# listen = \"0.0.0.0:8443\"".to_owned(), listen_line),
    );
    if let Some(site) = site {
        text.push('\n');
        text.push_str(site);
    }
    text
}

/// Lines that an existing configuration file lacks; empty if it lacks none.
fn missing_lines(files: &UserFiles, (router, share): (&RouterConfig, Option<u16>), cluster: &ClusterConfig, site: Option<&str>) -> String {
    let settings = [("tls_dir", &router.tls_dir, &files.authority), ("keys_file", &router.keys_file, &files.keys)];
    let missing = settings.into_iter().filter(|(_, set, _)| set.as_os_str().is_empty());
    let mut lines: String = missing.map(|(name, _, path)| format!("{name} = {}\n", quote(path))).collect();
    if let Some(line) = share.map(listen_line).filter(|line| *line != format!("listen = \"{}\"", router.listen)) {
        lines.push_str(&format!("{line}\n"));
    }
    if !lines.is_empty() {
        lines.insert_str(0, "[router]\n");
    }
    if let Some(site) = site.filter(|_| *cluster == ClusterConfig::default()) {
        lines.push_str(if lines.is_empty() { "" } else { "\n" });
        lines.push_str(site);
    }
    lines
}

/// The setting of an edge that other hosts reach.
fn listen_line(port: u16) -> String {
    format!("listen = \"0.0.0.0:{port}\"")
}

/// A path as a TOML string.
fn quote(path: &Path) -> String {
    toml::Value::from(path.display().to_string()).to_string()
}

#[cfg(test)]
mod tests;
