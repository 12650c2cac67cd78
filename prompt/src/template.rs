//! Chat templates of a model, rendered as in the `transformers` library.
//!
//! `python` has their Python features; `content` finds the shape of message that a template
//! expects.

mod content;
mod python;
mod strftime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value};

pub(crate) use content::ContentShape;

use crate::{EncodeError, FilesError};

/// Most steps of the template engine per rendering: about a second of one core.
///
/// Models' templates need some hundreds per message.
const MAX_STEPS: u64 = 10_000_000;

const NAME: &str = "chat";

#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    source: String,
    shape: ContentShape,
}

impl Template {
    pub(crate) fn new(source: &str) -> Result<Self, FilesError> {
        let wrong = |error: minijinja::Error| FilesError::Template(describe_error(&error));
        // Jinja treats every kind of line end alike. The tag that marks generated text in training
        // data only opens a scope here.
        let source = without_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(wrong)?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(MAX_STEPS));
        python::extend(&mut environment);
        environment.add_template_owned(NAME, source.clone()).map_err(wrong)?;
        let shape = ContentShape::of(&source).map_err(wrong)?;
        Ok(Self { environment, source, shape })
    }

    /// Shape of a message's content that this template expects.
    pub(crate) fn shape(&self) -> ContentShape {
        self.shape
    }

    /// Whether the template contains this text.
    ///
    /// Engines use this test for whether it knows a role or a field.
    pub(crate) fn contains(&self, words: &str) -> bool {
        self.source.contains(words)
    }

    pub(crate) fn render(&self, variables: &serde_json::Map<String, serde_json::Value>) -> Result<String, EncodeError> {
        let refused = |error: minijinja::Error| EncodeError::Template(describe_error(&error));
        let template = self.environment.get_template(NAME).map_err(refused)?;
        template.render(Value::from(Serde(variables))).map_err(refused)
    }
}

/// Reason of an error only: the template's own message if it raised, without the surrounding lines,
/// which contain users' text.
fn describe_error(error: &minijinja::Error) -> String {
    let mut words = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        words.push_str(&format!(" (line {line})"));
    }
    words
}

/// Turns `{% generation %}` and its end into `{% with %}`. Both open a scope and write its content.
fn without_generation_tags(source: &str) -> String {
    let mut rewritten = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        rewritten.push_str(before);
        let inner = tag.trim_start_matches(['-', '+']);
        let mark = &tag[..tag.len() - inner.len()];
        let word = inner.trim_start();
        let replaced = [("generation", " with "), ("endgeneration", " endwith ")].into_iter().find_map(|(name, with)| {
            let after = word.strip_prefix(name)?.trim_start();
            let closes = after.trim_start_matches(['-', '+']).starts_with("%}");
            closes.then_some((with, after))
        });
        rest = match replaced {
            Some((with, after)) => {
                rewritten.push_str(mark);
                rewritten.push_str(with);
                after
            }
            None => tag,
        };
    }
    rewritten.push_str(rest);
    rewritten
}

#[cfg(test)]
mod tests;
