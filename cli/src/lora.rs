//! `hostler lora load`, `unload` and `list`: which LoRA adapters the fleet serves, and where.

use std::collections::BTreeMap;
use std::path::Path;

use clap::{Args, Subcommand};
use hostler_proto::fleet::v1::{LoraRequest, Node};
use serde::Deserialize;

use crate::admin::{AdminArgs, connect, connect_for_long_call, list_fleet, status_error};
use crate::output::{Side, say, table};

#[derive(Debug, Subcommand)]
pub(crate) enum Lora {
    /// Load an adapter into engines that run, and into each of their further lives. They need
    /// --enable-lora among agent.engine_args.
    Load(LoadAdapterArgs),
    /// Unload an adapter.
    Unload(UnloadAdapterArgs),
    /// Show the adapters and the replicas that have them.
    List(ListAdaptersArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LoadAdapterArgs {
    /// The name that requests use as their model.
    name: String,
    /// Where the adapter is on the nodes: a folder that each of their engines can read.
    path: String,
    /// A node, or a replica as `node/index`; every replica of the fleet if left out.
    #[arg(long, value_name = "TARGET")]
    on: Option<String>,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UnloadAdapterArgs {
    /// The adapter's name.
    name: String,
    /// A node, or a replica as `node/index`; every replica of the fleet if left out.
    #[arg(long, value_name = "TARGET")]
    on: Option<String>,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListAdaptersArgs {
    #[command(flatten)]
    admin: AdminArgs,
}

impl Lora {
    pub(crate) fn admin(&mut self) -> &mut AdminArgs {
        match self {
            Self::Load(args) => &mut args.admin,
            Self::Unload(args) => &mut args.admin,
            Self::List(args) => &mut args.admin,
        }
    }
}

pub(crate) async fn lora(command: &Lora) -> anyhow::Result<()> {
    match command {
        Lora::Load(LoadAdapterArgs { name, path, on, admin }) => {
            anyhow::ensure!(!path.is_empty(), "the adapter's path is empty");
            let request = LoraRequest { target: on.clone().unwrap_or_default(), name: name.clone(), path: absolute_path(path) };
            let done = change(admin, request).await?;
            say(&format!("loaded {name} on {done}"));
        }
        Lora::Unload(UnloadAdapterArgs { name, on, admin }) => {
            let request = LoraRequest { target: on.clone().unwrap_or_default(), name: name.clone(), path: String::new() };
            let done = change(admin, request).await?;
            say(&format!("unloaded {name} on {done}"));
        }
        Lora::List(ListAdaptersArgs { admin }) => {
            let nodes = list_fleet(&mut connect(admin).await?).await?.nodes;
            list(nodes).iter().for_each(|line| say(line));
        }
    }
    Ok(())
}

/// Makes a folder that exists here absolute, because engines run in other directories. The nodes
/// resolve any other path.
fn absolute_path(path: &str) -> String {
    let here = Path::new(path);
    let whole = std::path::absolute(here).ok().filter(|_| here.is_dir());
    whole.and_then(|whole| Some(whole.to_str()?.to_owned())).unwrap_or_else(|| path.to_owned())
}

async fn change(admin: &AdminArgs, request: LoraRequest) -> anyhow::Result<String> {
    let answer = connect_for_long_call(admin).await?.lora(request).await.map_err(status_error)?;
    Ok(answer.into_inner().replicas.join(", "))
}

fn list(nodes: Vec<Node>) -> Vec<String> {
    #[derive(Deserialize)]
    struct Card {
        parent: Option<String>,
        root: Option<String>,
    }
    let mut adapters: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for replica in nodes.into_iter().flat_map(|node| node.replicas) {
        for model in replica.state.unwrap_or_default().models {
            if let Ok(Card { parent: Some(_), root }) = serde_json::from_slice(&model.card) {
                adapters.entry((model.id, root.unwrap_or_default())).or_default().push(replica.id.clone());
            }
        }
    }
    if adapters.is_empty() {
        return vec!["no adapters are loaded".to_owned()];
    }
    let head = ["ADAPTER", "PATH", "REPLICAS"].map(str::to_owned);
    let rows = adapters.into_iter().map(|((name, path), replicas)| [name, path, replicas.join(" ")]);
    table([Side::Left; 3], &[head].into_iter().chain(rows).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_existing_adapter_folder_is_made_absolute() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(super::absolute_path("src"), here.join("src").to_str().unwrap());
        for other in ["/no/where", "somebody/poet", "no-folder-here"] {
            assert_eq!(super::absolute_path(other), other);
        }
    }

    use hostler_proto::agent::v1::{Model, ReplicaState};
    use hostler_proto::fleet::v1::Replica;

    use super::*;

    #[test]
    fn the_adapter_list_shows_replicas_and_no_models() {
        let model = |id: &str, card: &str| Model { id: id.to_owned(), card: card.to_owned().into_bytes().into(), alias_of: String::new() };
        let replica = |id: &str, models: Vec<Model>| Replica {
            id: id.to_owned(),
            state: Some(ReplicaState { models, ..ReplicaState::default() }),
            ..Replica::default()
        };
        let base = model("base", r#"{"id":"base","parent":null}"#);
        let adapter = model("poet", r#"{"id":"poet","parent":"base","root":"/adapters/poet"}"#);
        let replicas = vec![
            replica("n/0", vec![base.clone(), adapter.clone()]),
            replica("n/1", vec![base.clone(), adapter]),
            replica("n/2", vec![base]),
        ];
        let lines = list(vec![Node { replicas, ..Node::default() }]);
        assert_eq!(lines, ["ADAPTER  PATH            REPLICAS", "poet     /adapters/poet  n/0 n/1"]);
        assert_eq!(list(Vec::new()), ["no adapters are loaded"]);
    }
}
