//! A model before an engine has described it: the names that its arguments give it, and an entry
//! for lists. Agents and controllers announce models so.

/// Flag for the names of the model. Answers have the first one.
pub const NAMES_FLAG: &str = "--served-model-name";

/// The names that an engine's arguments give its model; `None` without that flag.
///
/// The flag has dashes or underscores, and its last occurrence counts.
#[must_use]
pub fn given_model_names(arguments: &[String]) -> Option<Vec<&str>> {
    let is_flag = |argument: &String| argument.split('=').next().is_some_and(|flag| flag.replace('_', "-") == NAMES_FLAG);
    let at = arguments.iter().rposition(is_flag)?;
    Some(match arguments[at].split_once('=') {
        Some((_, name)) => vec![name],
        None => arguments[at + 1..].iter().map(String::as_str).take_while(|word| !word.starts_with('-')).collect(),
    })
}

/// The entry of a model in lists, JSON. No engine has said when it was created.
#[must_use]
pub fn announced_card(id: &str) -> String {
    serde_json::json!({"id": id, "object": "model", "created": 0, "owned_by": "hostler"}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_flag_gives_a_model_its_names() {
        let table: [(&str, Option<&[&str]>); 5] = [
            ("org/m --seed 1", None),
            ("--served-model-name org/m m --seed 1 --served_model_name a b -q fp8", Some(&["a", "b"])),
            ("--served-model-name a b --served-model-name=c d", Some(&["c"])),
            ("--served-model-name", Some(&[])),
            ("served-model-name a", None),
        ];
        for (line, expected) in table {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(given_model_names(&arguments).as_deref(), expected, "{line}");
        }
    }
}
