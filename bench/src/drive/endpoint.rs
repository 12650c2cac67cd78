//! Checks of the targets before anything is measured: whether they answer, which model they have,
//! whether there are metrics.

use std::env;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use serde::Deserialize;

use super::body::RequestOptions;
use super::conversation::Endpoint;
use crate::args::BenchArgs;
use crate::client::{Client, ClientError};
use crate::error::Error;
use crate::fleet::FleetProbe;
use crate::target::Target;

/// Time limit for a target to name its models. It is longer than a connection may take.
const MODELS_TIMEOUT: Duration = Duration::from_secs(15);

/// Time limit for the first page of metrics; an engine under load takes its time.
const METRICS_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

pub(super) async fn endpoints(args: &BenchArgs) -> Result<Vec<Arc<Endpoint>>, Error> {
    let key = key(&args.common.key_env)?;
    let mut endpoints = Vec::new();
    for (index, target) in args.common.target.iter().enumerate() {
        let model = model(target, key.clone(), args.common.model.as_deref()).await?;
        let form = RequestOptions {
            api: args.common.api,
            model,
            stream: !args.common.no_stream,
            ignore_eos: args.common.ignore_eos,
            response_formats: args.response_formats()?,
        };
        endpoints.push(Arc::new(Endpoint {
            name: args.target_name(index),
            target: target.clone(),
            key: key.clone(),
            form,
            request_timeout: args.common.request_timeout,
            metrics: metrics(target, args.common.metrics.get(index)).await?,
        }));
    }
    Ok(endpoints)
}

fn key(variable: &str) -> Result<Option<HeaderValue>, Error> {
    let unusable = || Error::Key { variable: variable.to_owned() };
    let Some(key) = env::var_os(variable).filter(|key| !key.is_empty()) else { return Ok(None) };
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.to_str().ok_or_else(unusable)?)).map_err(|_| unusable())?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Model to ask for.
///
/// The target is asked in any case, so that a missing one is noticed before the load begins.
async fn model(target: &Target, key: Option<HeaderValue>, requested: Option<&str>) -> Result<String, Error> {
    let page = Client::new(target.place.clone()).get(&format!("{}/models", target.path), key, MODELS_TIMEOUT).await;
    if let Err(error @ (ClientError::Connect(_) | ClientError::ConnectTimeout)) = page {
        return Err(Error::Unreachable { target: target.to_string(), reason: error.to_string() });
    }
    if let Some(model) = requested {
        return Ok(model.to_owned());
    }
    let unnamed = |reason: String| Error::NoModel { target: target.to_string(), reason };
    let page = page.map_err(|error| unnamed(error.to_string()))?;
    let models: Models = serde_json::from_slice(&page).map_err(|_| unnamed("its /models is no list of models".to_owned()))?;
    models.data.into_iter().next().map(|model| model.id).ok_or_else(|| unnamed("its list of models is empty".to_owned()))
}

/// Page of metrics. A named page must have samples; the target's own is used if it has some.
async fn metrics(target: &Target, named: Option<&Target>) -> Result<Option<Target>, Error> {
    let page = named.cloned().unwrap_or_else(|| target.metrics());
    let unusable = |reason: String| match named {
        Some(page) => Err(Error::NoMetrics { page: page.to_string(), reason }),
        None => Ok(None),
    };
    match FleetProbe::try_page(&page, METRICS_TIMEOUT).await {
        Ok(true) => Ok(Some(page)),
        Ok(false) => unusable("it has no KV use and no prefix cache of an engine".to_owned()),
        Err(error) => unusable(error.to_string()),
    }
}
