//! The route `/v1/models`: every name that requests may use, including those of adapters.

use http::StatusCode;

use super::errors::json_string;
use super::{Api, random_id};
use crate::reply::{Reply, json};

pub(crate) fn models(api: &Api) -> Reply {
    let (created, longest) = (api.created, api.args.context_length());
    let root = json_string(&api.args.model);
    let cards = api.args.served_names().into_iter().map(|name| {
        let (name, permission) = (json_string(&name), random_id(16));
        format!(
            r#"{{"id":{name},"object":"model","created":{created},"owned_by":"vllm","root":{root},"parent":null,"max_model_len":{longest},"permission":[{{"id":"modelperm-{permission}","object":"model_permission","created":{created},"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}}]}}"#
        )
    });
    let adapters = api.adapters.all().into_iter().map(|adapter| {
        let (name, root, parent) = (json_string(&adapter.name), json_string(&adapter.path), json_string(api.args.served_name()));
        let permission = random_id(16);
        format!(
            r#"{{"id":{name},"object":"model","created":{created},"owned_by":"vllm","root":{root},"parent":{parent},"max_model_len":null,"permission":[{{"id":"modelperm-{permission}","object":"model_permission","created":{created},"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}}]}}"#
        )
    });
    let cards: Vec<String> = cards.chain(adapters).collect();
    json(StatusCode::OK, format!(r#"{{"object":"list","data":[{}]}}"#, cards.join(",")))
}
