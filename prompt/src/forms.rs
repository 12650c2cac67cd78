//! The forms that a request's prompt has. Engines encode some forms in a way of their own while they agree about the others, so what a
//! comparison has shown is known by form, and a request is encoded here only if all of its forms were agreed about.

use std::fmt;

use serde_json::Value;

use crate::Request;
use crate::request::{Chat, Prompt};

/// One thing about a prompt that an engine may treat in a way of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// No conversation: the prompt of a completion.
    Texts,
    /// A conversation, whatever else it is.
    Chats,
    /// A conversation after which the template does not open an answer.
    Closed,
    /// A conversation whose final message the answer continues.
    Continued,
    /// The content of a message is a list of parts.
    Parts,
    /// There are tools, calls of tools or results of them.
    Tools,
}

impl Form {
    /// All of them, the common ones first: where a prompt of several forms is not encoded as the engine does it, the last one is to blame.
    pub const ALL: [Self; 6] = [Self::Texts, Self::Chats, Self::Closed, Self::Continued, Self::Parts, Self::Tools];

    /// For people: what requests of this form are.
    #[must_use]
    pub fn name(self) -> &'static str {
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
    pub fn unproved(self) -> &'static str {
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

/// A set of forms.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Forms(u8);

impl Forms {
    /// Every form.
    pub const ALL: Self = Self((1 << Form::ALL.len()) - 1);

    /// This set and that form.
    #[must_use]
    pub fn with(self, form: Form) -> Self {
        Self(self.0 | 1 << form as u8)
    }

    /// What is in this set but not in the other.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the form is in it.
    #[must_use]
    pub fn has(self, form: Form) -> bool {
        self.0 & 1 << form as u8 != 0
    }

    /// Its forms, the common ones first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Form> {
        Form::ALL.into_iter().filter(move |form| self.has(*form))
    }

    /// For operators: what is placed by text while only these forms are encoded; empty when these are all.
    #[must_use]
    pub fn remark(self) -> String {
        let open = Self::ALL.without(self);
        // Whoever has no chats has none of their kinds either.
        let names: Vec<&str> = match open.has(Form::Chats) {
            true => open.iter().filter(|form| matches!(form, Form::Texts | Form::Chats)).map(Form::name).collect(),
            false => open.iter().map(Form::name).collect(),
        };
        if names.is_empty() { String::new() } else { format!("{} are placed by text", names.join(", ")) }
    }

    fn when(self, condition: bool, form: Form) -> Self {
        if condition { self.with(form) } else { self }
    }
}

impl FromIterator<Form> for Forms {
    fn from_iter<I: IntoIterator<Item = Form>>(forms: I) -> Self {
        forms.into_iter().fold(Self::default(), Self::with)
    }
}

impl fmt::Debug for Forms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl Request {
    /// The forms of its prompt.
    #[must_use]
    pub fn forms(&self) -> Forms {
        match &self.prompt {
            // Token ids come by the route of texts, and nothing else is known of what the engine does there.
            Prompt::Text { .. } | Prompt::Tokens { .. } => Forms::default().with(Form::Texts),
            Prompt::Chat(chat) => of_chat(chat),
        }
    }
}

fn of_chat(chat: &Chat) -> Forms {
    let given = |message: &Value, name: &str| message.get(name).is_some_and(|value| !value.is_null());
    let in_parts = |message: &Value| message.get("content").is_some_and(Value::is_array);
    let of_tools = |message: &Value| {
        message.get("role").is_some_and(|role| role == "tool")
            || ["tool_calls", "tool_call_id", "tools"].iter().any(|name| given(message, name))
    };
    Forms::default()
        .with(Form::Chats)
        .when(!chat.add_generation_prompt, Form::Closed)
        .when(chat.continue_final_message, Form::Continued)
        .when(chat.messages.iter().any(in_parts), Form::Parts)
        .when(chat.tools.is_some() || chat.messages.iter().any(of_tools), Form::Tools)
}

#[cfg(test)]
mod tests;
