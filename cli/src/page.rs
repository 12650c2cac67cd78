//! `hostler page`: prints the address of the router's page with a token that lets one browser in,
//! and opens a browser.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hostler_boot::home;
use hostler_boot::socket::is_private_folder;
use hostler_proto::fleet::v1::OpenPageRequest;
use hostler_tls::write_private;

use crate::admin::{AdminArgs, AdminEndpoint, RouterAddress, status_error};
use crate::output::{complain, say};

#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// For watching alone: nothing can be drained or restarted from there.
    #[arg(long)]
    watch: bool,
    /// Print the address and open no browser.
    #[arg(long)]
    no_open: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn page(args: &PageArgs) -> anyhow::Result<()> {
    let router = RouterAddress::find(&args.admin).await?;
    if let AdminEndpoint::Fleet(_) = router.endpoint() {
        bail!(
            "the router is in a batch job, and a browser here neither reaches its loopback nor knows its certificate: `hostler top` shows the same"
        );
    }
    let request = OpenPageRequest { watch_only: args.watch };
    let opened = router.connect().await?.open_page(request).await.map_err(status_error)?.into_inner();
    // The token goes into a terminal and into an HTML file.
    let is_token = !opened.token.is_empty() && opened.token.bytes().all(|byte| byte.is_ascii_hexdigit());
    let seen_there: SocketAddr = opened.address.parse().ok().filter(|_| is_token).context("what answers there is no router")?;
    // A named socket may be forwarded from another host, and a listener at this host's loopback
    // would get the token.
    let (address, is_here) = match router.endpoint() {
        AdminEndpoint::Address(address) => (address.clone(), true),
        _ => (seen_there.to_string(), args.admin.admin.is_none()),
    };
    // The token follows the `#`, because browsers send that part to nobody.
    let link = format!("http://{address}/#token={}", opened.token);
    say(&link);
    let valid = humantime::format_duration(Duration::from_millis(opened.valid_ms));
    complain(&format!("It lets one browser in, within {valid}."));
    if args.admin.admin.is_none() || !is_here {
        complain(&format!(
            "A browser on another host than the router's gets there through: ssh -L {}:{seen_there} HOST",
            seen_there.port()
        ));
    }
    match browser(|name| std::env::var(name).ok()).filter(|_| is_here && !args.no_open) {
        Some(browser) => open(&browser, &link).context("cannot open a browser; --no-open does not try"),
        None => Ok(()),
    }
}

/// Command that shows a file to the user, if there is one.
fn browser(variable: impl Fn(&str) -> Option<String>) -> Option<Vec<String>> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(words) = set("BROWSER").and_then(|words| shlex::split(&words)).filter(|words| !words.is_empty()) {
        return Some(words);
    }
    (set("DISPLAY").is_some() || set("WAYLAND_DISPLAY").is_some()).then(|| vec!["xdg-open".to_owned()])
}

/// Opens a file that leads to the address. The address holds the token, and other users see command
/// lines.
fn open(browser: &[String], address: &str) -> anyhow::Result<()> {
    let folder = home::run_dirs().into_iter().find(|folder| is_private_folder(folder));
    let file = folder.context("there is no folder of your own for the file that leads to the page")?.join("page.html");
    write_private(&file, format!("<!doctype html><meta http-equiv=\"refresh\" content=\"0;url={address}\">\n").as_bytes())?;
    let mut command = command(browser, &file);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // From here on the browser belongs to the user, and may run for days.
    command.spawn().map(drop).with_context(|| format!("cannot run {}", browser[0]))
}

/// Replaces `%s` by the file, or appends the file if there is no `%s`.
fn command(browser: &[String], file: &Path) -> Command {
    let mut command = Command::new(&browser[0]);
    let arguments = browser[1..].iter().map(|word| if word == "%s" { file.to_owned() } else { PathBuf::from(word) });
    command.args(arguments);
    if !browser.iter().any(|word| word == "%s") {
        command.arg(file);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(variables: &[(&str, &str)]) -> Option<Vec<String>> {
        browser(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn a_browser_is_the_users_choice_or_the_desktops() {
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&[("DISPLAY", "")]), None);
        assert_eq!(chosen(&[("DISPLAY", ":0")]).unwrap(), ["xdg-open"]);
        assert_eq!(
            chosen(&[("WAYLAND_DISPLAY", "wayland-0"), ("BROWSER", "firefox --new-window %s")]).unwrap(),
            ["firefox", "--new-window", "%s"]
        );
        let shown = |words: &[&str]| {
            format!("{:?}", command(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), Path::new("/run/p.html")))
        };
        assert_eq!(shown(&["firefox", "%s", "-x"]), "\"firefox\" \"/run/p.html\" \"-x\"");
        assert_eq!(shown(&["xdg-open"]), "\"xdg-open\" \"/run/p.html\"");
    }
}
