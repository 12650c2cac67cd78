//! Forms of a request's prompt.
//!
//! Engines may encode some forms differently while they agree about the others, so the results of a
//! comparison are kept by form. A request is encoded here only if all of its forms were agreed
//! about.

use std::fmt;

use serde_json::Value;

use crate::PromptRequest;
use crate::request::{Chat, Prompt};

/// Property of a prompt that engines may treat in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptForm {
    /// The prompt of a completion.
    Texts,
    /// Any conversation.
    Chats,
    /// A conversation after which the template does not open an answer.
    Closed,
    /// A conversation whose final message the answer continues.
    Continued,
    /// A message's content is a list of parts.
    Parts,
    /// There are tools, calls of tools or results of them.
    Tools,
}

impl PromptForm {
    /// All forms, the common ones first.
    ///
    /// If a prompt of several forms is encoded differently from the engine, the last one is to
    /// blame.
    pub const ALL: [Self; 6] = [Self::Texts, Self::Chats, Self::Closed, Self::Continued, Self::Parts, Self::Tools];

    /// Description of requests of this form, for people.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Texts => "texts",
            Self::Chats => "chats",
            Self::Closed => "chats without generation prompt",
            Self::Continued => "continued messages",
            Self::Parts => "messages in parts",
            Self::Tools => "tools",
        }
    }

    /// Why such a request has no tokens, for operators.
    #[must_use]
    pub fn unproved_reason(self) -> &'static str {
        match self {
            Self::Texts => "texts not proved",
            Self::Chats => "chats not proved",
            Self::Closed => "chats without generation prompt not proved",
            Self::Continued => "continued messages not proved",
            Self::Parts => "messages in parts not proved",
            Self::Tools => "tools not proved",
        }
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptForms(u8);

impl PromptForms {
    pub const ALL: Self = Self((1 << PromptForm::ALL.len()) - 1);

    #[must_use]
    pub fn with(self, form: PromptForm) -> Self {
        Self(self.0 | 1 << form as u8)
    }

    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    #[must_use]
    pub fn has(self, form: PromptForm) -> bool {
        self.0 & 1 << form as u8 != 0
    }

    /// Forms of the prompt, the common ones first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = PromptForm> {
        PromptForm::ALL.into_iter().filter(move |form| self.has(*form))
    }

    /// Remark for operators about requests placed by text while only these forms are proved.
    ///
    /// Empty if these are all forms.
    #[must_use]
    pub fn unproved_remark(self) -> String {
        let open = Self::ALL.without(self);
        // If chats are missing, their special forms need not be named.
        let names: Vec<&str> = match open.has(PromptForm::Chats) {
            true => open.iter().filter(|form| matches!(form, PromptForm::Texts | PromptForm::Chats)).map(PromptForm::description).collect(),
            false => open.iter().map(PromptForm::description).collect(),
        };
        if names.is_empty() { String::new() } else { format!("{} are placed by text", names.join(", ")) }
    }

    fn with_if(self, condition: bool, form: PromptForm) -> Self {
        if condition { self.with(form) } else { self }
    }
}

impl FromIterator<PromptForm> for PromptForms {
    fn from_iter<I: IntoIterator<Item = PromptForm>>(forms: I) -> Self {
        forms.into_iter().fold(Self::default(), Self::with)
    }
}

impl fmt::Debug for PromptForms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl PromptRequest {
    #[must_use]
    pub fn forms(&self) -> PromptForms {
        match &self.prompt {
            // Token ids use the route of texts, and nothing else is known about the engine's
            // behaviour there.
            Prompt::Text { .. } | Prompt::Tokens { .. } => PromptForms::default().with(PromptForm::Texts),
            Prompt::Chat(chat) => forms_of_chat(chat),
        }
    }
}

fn forms_of_chat(chat: &Chat) -> PromptForms {
    let given = |message: &Value, name: &str| message.get(name).is_some_and(|value| !value.is_null());
    let in_parts = |message: &Value| message.get("content").is_some_and(Value::is_array);
    let of_tools = |message: &Value| {
        message.get("role").is_some_and(|role| role == "tool")
            || ["tool_calls", "tool_call_id", "tools"].iter().any(|name| given(message, name))
    };
    PromptForms::default()
        .with(PromptForm::Chats)
        .with_if(!chat.add_generation_prompt, PromptForm::Closed)
        .with_if(chat.continue_final_message, PromptForm::Continued)
        .with_if(chat.messages.iter().any(in_parts), PromptForm::Parts)
        .with_if(chat.tools.is_some() || chat.messages.iter().any(of_tools), PromptForm::Tools)
}

#[cfg(test)]
mod tests;
