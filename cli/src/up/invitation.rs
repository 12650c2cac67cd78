//! What `hostler up` says of its engines: how far they have come, then how to use them.

use std::path::PathBuf;
use std::time::Duration;

use hostler_boot::Shutdown;
use hostler_proto::fleet::v1::Replica;
use tokio::task::JoinHandle;

use super::{POLL_INTERVAL, Voice};
use crate::admin::{AdminClient, list_fleet};
use crate::output::describe;
use crate::up_record::UpRouter;

/// How often the line about all engines is written anew once they serve.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// What is said of the engines of this process while they start.
pub(super) struct Invitation {
    /// The edge's URL, without a path.
    edge: String,
    /// The file of the user's key, if the edge wants keys.
    key_file: Option<PathBuf>,
    /// The node of this process, where the router has others.
    node: Option<String>,
}

impl Invitation {
    /// To an edge at this URL, and to the engines of this node.
    pub(super) fn to_edge(edge: String, key_file: Option<PathBuf>, node: Option<String>) -> Self {
        Self { edge, key_file, node }
    }

    /// To this router, and to the engines of this node.
    pub(super) fn to(router: &UpRouter, node: Option<String>) -> Self {
        Self { edge: router.base_url.trim_end_matches("/v1").to_owned(), key_file: router.key_file.clone(), node }
    }

    /// Shows how far the engines have come until they serve or have failed, then how to use them.
    /// On a screen it goes on.
    async fn announce(&self, mut fleet: AdminClient, voice: &mut Voice) -> anyhow::Result<()> {
        let mut is_settled = false;
        loop {
            let mut listed = list_fleet(&mut fleet).await?;
            listed.nodes.retain(|node| self.node.as_ref().is_none_or(|own| *own == node.name));
            let replicas: Vec<Replica> = listed.nodes.into_iter().flat_map(|node| node.replicas).collect();
            voice.show(&replicas, &listed.findings);
            if !is_settled && !replicas.is_empty() && replicas.iter().all(|replica| !replica.is_coming()) {
                is_settled = true;
                self.invite(&replicas, voice);
            }
            if is_settled && !voice.is_screen() {
                return Ok(());
            }
            tokio::time::sleep(if is_settled { STATUS_INTERVAL } else { POLL_INTERVAL }).await;
        }
    }

    /// Says how many serve, and how to use them.
    fn invite(&self, replicas: &[Replica], voice: &Voice) {
        let ready: Vec<&Replica> = replicas.iter().filter(|replica| replica.is_ready()).collect();
        voice.say(&format!("ready   {} of {} replicas", ready.len(), replicas.len()));
        if let Some(model) = ready.iter().find_map(|replica| replica.model_ids().next()) {
            voice.say(&self.curl(model));
        }
    }

    /// A command line that asks this model, as a shell takes it.
    pub(super) fn curl(&self, model: &str) -> String {
        let body = serde_json::json!({"model": model, "stream": true, "messages": [{"role": "user", "content": "Hello"}]});
        let (header, remark) = match &self.key_file {
            None => (String::new(), ""),
            Some(file) if file.is_file() => {
                let path = file.display().to_string();
                let word = shlex::try_quote(&path).unwrap_or_default();
                (format!(" -H \"authorization: Bearer $(cat {word})\""), "")
            }
            // The keys are those of others.
            Some(_) => (" -H \"authorization: Bearer $OPENAI_API_KEY\"".to_owned(), "  # with a key in OPENAI_API_KEY"),
        };
        format!(
            "curl -N {}/v1/chat/completions{header} -H 'content-type: application/json' -d '{}'{remark}",
            self.edge,
            body.to_string().replace('\'', "'\\''")
        )
    }
}

/// The task that speaks while this process serves.
pub(super) struct Announced(JoinHandle<()>);

impl Announced {
    pub(super) fn begin(
        invitation: Invitation,
        mut voice: Voice,
        shutdown: &Shutdown,
        connect: impl Future<Output = anyhow::Result<AdminClient>> + Send + 'static,
    ) -> Self {
        let shutdown = shutdown.clone();
        Self(tokio::spawn(async move {
            let announce = async {
                let ended = async { invitation.announce(connect.await?, &mut voice).await }.await;
                if let Err(error) = ended {
                    tracing::warn!(error = %describe(&error), "what the engines do is shown no longer");
                }
            };
            tokio::select! {
                () = shutdown.wait_drain() => {}
                () = announce => shutdown.wait_drain().await,
            }
            voice.leave();
            std::future::pending::<()>().await;
        }))
    }

    /// Removes the lines that change.
    pub(super) async fn end(self) {
        self.0.abort();
        // It was just aborted.
        let _ = self.0.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curl(key_file: Option<PathBuf>) -> String {
        Invitation::to_edge("http://127.0.0.1:8000".into(), key_file, None).curl("tiny")
    }

    #[test]
    fn the_command_line_has_the_users_key_where_the_edge_wants_one() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("a key");
        std::fs::write(&file, "hk_a_b\n").unwrap();
        assert!(!curl(None).contains("authorization"));
        assert!(curl(Some(file.clone())).contains(&format!("-H \"authorization: Bearer $(cat '{}')\"", file.display())));
        let others = curl(Some("/nowhere/user.key".into()));
        assert!(others.contains("Bearer $OPENAI_API_KEY\"") && others.ends_with("'  # with a key in OPENAI_API_KEY"), "{others}");
    }
}
