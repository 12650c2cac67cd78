//! Removes secrets from texts: values of environment variables with secret names, and everything
//! that looks like a secret. Pure.

use regex::{Captures, Regex};

/// Replaces a removed secret.
const REMOVED: &str = "[removed]";

/// Shortest secret value. A shorter one, such as `1`, is no secret, and would be found in every
/// line.
const SHORTEST_VALUE: usize = 8;

/// Parts of a variable's name that mark its value as secret. OpenTelemetry keeps a collector's key
/// among its headers.
const SECRET_NAMES: [&str; 6] = ["TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "OTLP_HEADERS"];

/// Patterns of secrets. Group `kept` is the text before the secret, and group `after`, if present,
/// the text after it.
const PATTERNS: [&str; 18] = [
    // A list, as vLLM logs its keys: {'api_key': ['one', 'two']}.
    r#"(?i)(?<kept>\b(?:api[_-]?keys?|passwords?|secrets?)\\?["']?\s*[:=]\s*\[)\s*\\?["'][^\]]+(?<after>\])"#,
    // A key of Hostler's edge or admin listener; its id is not secret.
    r"(?<kept>\bhk_[a-z2-7]{10}_)[a-z2-7]{20,}",
    // A token by which nodes join.
    r"(?<kept>\b[0-9a-f]{16}\.)[0-9a-f]{64}\b",
    // Keys of Hugging Face, and of the many services that write keys as OpenAI does.
    r"(?<kept>\b(?:hf_|sk-))[A-Za-z0-9_-]{16,}",
    r#"(?i)(?<kept>\b(?:bearer|authorization["']?\s*[:=]\s*["']?basic)(?:\s|%20)+)[^\s"',]{8,}"#,
    // An argument and its value, also as two items of a list in JSON.
    r#"(?<kept>--(?:api-key|hf-token|[a-z-]*password|[a-z-]*secret)(?:=|\s|"\s*,\s*")\s*)[^\s"',]+"#,
    r#"(?<kept>\b[A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD)\s*=\s*["']?)[^\s"']{8,}"#,
    // These names in quotes, as in JSON and in Python. The JSON may itself be quoted.
    r#"(?<kept>\\?["'][A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD)\\?["']\s*[:=]\s*\\?["'])[^"'\\]+"#,
    // In lower case, a bare `key` is the id of one, and `tokens` are counted.
    r#"(?i)(?<kept>\\?["'][a-z0-9_.-]*(?:token|secret|passw(?:or)?d|credentials?|(?:api|access|secret|private|auth)[_-]?key)\\?["']\s*[:=]\s*\\?["'])[^"'\\]+"#,
    r#"(?i)(?<kept>\b[a-z0-9_.-]*(?:passw(?:or)?d|secret|token|(?:api|access|secret|private|auth)[_-]?key)\s*=\s*["'])[^"']+"#,
    r#"(?i)(?<kept>\b[a-z0-9_.-]*(?:passw(?:or)?d|secret|(?:api|access|secret|private|auth)[_-]?key)\s*=\s*)[^\s"',;&)}\[\]][^\s"',;&)}\]]*"#,
    r#"(?i)(?<kept>\b(?:passw(?:or)?d|x-[a-z-]*(?:key|token))\s*:\s*)[^\s"',;&]+"#,
    // Headers for OpenTelemetry's collector: pairs with commas between them.
    r#"(?i)(?<kept>\b[a-z_]*otlp_(?:[a-z]+_)?headers\\?["']?\s*[:=]\s*\\?["']?)[^\s"'\\]+"#,
    // URL parameters that sign a URL, or act as its password.
    r#"(?i)(?<kept>[?&](?:x-(?:amz|goog)-(?:signature|security-token|credential)|sig|signature|token|[a-z]+_token|auth|key|api_?key)=)[^&\s"'<>#]+"#,
    // Tokens of GitHub and GitLab, and web tokens, which are JSON in base64.
    r"(?<kept>\b(?:gh[a-z]_|github_pat_|glpat-))[A-Za-z0-9_-]{16,}",
    r"(?<kept>\beyJ)[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*",
    // User and password of a URL.
    r"(?<kept>://)[^/\s@:]+:[^/\s@]+(?<after>@)",
    r"(?s)(?<kept>-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?<after>-----END|\z)",
];

/// Rules and values to remove.
#[derive(Debug)]
pub(super) struct Redaction {
    patterns: Vec<Regex>,
    values: Vec<String>,
}

impl Redaction {
    /// A redaction that also removes the secret values of an environment.
    pub(super) fn new(environment: impl IntoIterator<Item = (String, String)>) -> Self {
        let is_secret = |name: &str| SECRET_NAMES.iter().any(|part| name.to_ascii_uppercase().contains(part));
        // Variables such as HOSTLER_ADMIN_KEY_FILE name a file, which reports may name too.
        let is_value = |value: &str| value.len() >= SHORTEST_VALUE && !value.starts_with('/');
        let named = environment.into_iter().filter(|(name, value)| is_secret(name) && is_value(value));
        let mut values: Vec<String> = named.map(|(_, value)| value).collect();
        // Longest first: one value may be the beginning of another.
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        let patterns = PATTERNS.iter().map(|pattern| Regex::new(pattern).expect("the patterns are tested")).collect();
        Self { patterns, values }
    }

    /// The text without secrets, and how many were removed.
    pub(super) fn apply(&self, text: &str) -> (String, usize) {
        let (mut text, mut removed) = (text.to_owned(), 0);
        for value in &self.values {
            removed += text.matches(value.as_str()).count();
            text = text.replace(value.as_str(), REMOVED);
        }
        for pattern in &self.patterns {
            let replaced = pattern.replace_all(&text, |found: &Captures<'_>| {
                // A secret that an earlier pattern has removed is not counted again.
                if found[0].ends_with(REMOVED) {
                    return found[0].to_owned();
                }
                removed += 1;
                let after = found.name("after").map_or("", |after| after.as_str());
                format!("{}{REMOVED}{after}", &found["kept"])
            });
            text = replaced.into_owned();
        }
        (text, removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(text: &str) -> (String, usize) {
        Redaction::new([]).apply(text)
    }

    #[test]
    fn secrets_are_redacted_and_their_neighbours_stay() {
        let key = format!("hk_abcdefghij_{}", "k".repeat(52));
        for (text, expected) in [
            (format!("key {key} of alice"), "key hk_abcdefghij_[removed] of alice"),
            (format!("token {}.{}#ab", "0a".repeat(8), "f1".repeat(32)), "token 0a0a0a0a0a0a0a0a.[removed]#ab"),
            ("HF_TOKEN=hf_0123456789abcdefghij vllm".into(), "HF_TOKEN=hf_[removed] vllm"),
            ("--api-key abc --port 1".into(), "--api-key [removed] --port 1"),
            ("--hf-token=abc".into(), "--hf-token=[removed]"),
            ("[\n  \"--api-key\",\n  \"abc\",\n  \"x\"\n]".into(), "[\n  \"--api-key\",\n  \"[removed]\",\n  \"x\"\n]"),
            ("authorization: Bearer abcdefgh1".into(), "authorization: Bearer [removed]"),
            ("proxy http://alice:pass@proxy:3128/".into(), "proxy http://[removed]@proxy:3128/"),
            (r#"{"HF_TOKEN": "abc", "x": 1}"#.into(), r#"{"HF_TOKEN": "[removed]", "x": 1}"#),
            (r#"{\"WANDB_API_KEY\": \"abc\"}"#.into(), r#"{\"WANDB_API_KEY\": \"[removed]\"}"#),
            (r#"{"password":"open sesame"}"#.into(), r#"{"password":"[removed]"}"#),
            ("{'hf_token': 'abc', 'seed': 0}".into(), "{'hf_token': '[removed]', 'seed': 0}"),
            ("args: {'api_key': ['one', 'two'], 'port': 1}".into(), "args: {'api_key': [[removed]], 'port': 1}"),
            ("Namespace(api_key=['one', 'two'], port=1)".into(), "Namespace(api_key=[[removed]], port=1)"),
            (r#"api_key = "abc def""#.into(), r#"api_key = "[removed]""#),
            ("dsn host=db password=hunter2 port=1".into(), "dsn host=db password=[removed] port=1"),
            ("Namespace(api_key=abc, port=1)".into(), "Namespace(api_key=[removed], port=1)"),
            ("password: hunter2".into(), "password: [removed]"),
            ("X-Api-Key: abc".into(), "X-Api-Key: [removed]"),
            ("authorization=Basic%20YWxpY2U6cGFzcw==".into(), "authorization=Basic%20[removed]"),
            ("OTEL_EXPORTER_OTLP_HEADERS=x-team=ab,dd=cd run".into(), "OTEL_EXPORTER_OTLP_HEADERS=[removed] run"),
            (r#""otlp_traces_headers": "x-team=ab""#.into(), r#""otlp_traces_headers": "[removed]""#),
            ("https://s3/m?a=1&X-Amz-Signature=0a1b&b=2".into(), "https://s3/m?a=1&X-Amz-Signature=[removed]&b=2"),
            ("https://blob/m?sv=1&sig=a%2Bb%3D".into(), "https://blob/m?sv=1&sig=[removed]"),
            ("GET /m?token=abc HTTP/1.1".into(), "GET /m?token=[removed] HTTP/1.1"),
            (format!("remote ghp_{}", "a1".repeat(18)), "remote ghp_[removed]"),
            (format!("clone glpat-{}.", "a1".repeat(10)), "clone glpat-[removed]."),
            ("got eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl, ok".into(), "got eyJ[removed], ok"),
            (
                "-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----".into(),
                "-----BEGIN PRIVATE KEY-----[removed]-----END PRIVATE KEY-----",
            ),
        ] {
            assert_eq!(apply(&text), (expected.to_owned(), 1), "{text}");
        }
    }

    #[test]
    fn common_log_words_are_not_redacted() {
        for text in [
            "max_tokens=200",
            "tokens_in=12 tokens_out=8",
            "--join-token-file /home/a/join-token",
            "key=cqlv5jx5mo",
            r#"{"key": "cqlv5jx5mo", "token_ids": "no", "max_tokens": "7"}"#,
            r#"{"join_token_file": "/home/a/join-token"}"#,
            "token: expected a string, next token=5",
            "tokenizer='m', keys=3, password is wrong",
            "http://127.0.0.1:8000/v1",
        ] {
            assert_eq!(apply(text), (text.to_owned(), 0), "{text}");
        }
    }

    #[test]
    fn values_of_secret_variables_are_redacted_everywhere() {
        let environment = [("MY_TOKEN", "open sesame"), ("A_KEY_FILE", "/home/a/user.key"), ("SHORT_KEY", "1"), ("SHELL", "/bin/bash")];
        let redaction = Redaction::new(environment.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let (text, removed) = redaction.apply("it said open sesame 1 of /home/a/user.key in /bin/bash; open sesame");
        assert_eq!((text.as_str(), removed), ("it said [removed] 1 of /home/a/user.key in /bin/bash; [removed]", 2));
    }
}
