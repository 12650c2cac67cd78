//! The second name of a model that is named by a path. Agents have engines serve it, and controllers
//! announce it.

/// The last part of a path, by which clients may name the model too. Shape: `/models/tiny` → `tiny`.
///
/// A path begins with `/`, `.` or `~`, or has more than one slash: names of Hugging Face are `name`
/// or `owner/name`. These get none, because clients know them as they are. A path with blanks gets
/// none either.
#[must_use]
pub fn path_alias(model: &str) -> Option<&str> {
    let path = model.trim_end_matches('/');
    let is_path = path.starts_with(['/', '.', '~']) || path.matches('/').count() > 1;
    let (_, last) = path.rsplit_once('/').filter(|_| is_path && !path.contains(char::is_whitespace))?;
    (!last.is_empty() && !last.starts_with(['.', '-'])).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_path_has_its_last_part_as_an_alias() {
        let aliases = [("/models/tiny", "tiny"), ("./tiny/", "tiny"), ("../tiny", "tiny"), ("~/tiny", "tiny"), ("models/org/tiny", "tiny")];
        for (path, alias) in aliases {
            assert_eq!(path_alias(path), Some(alias), "{path}");
        }
        for name in ["", "tiny", "org/tiny", "/", ".", "..", "./", "../..", "/models/a b", "/my models/tiny", "./-tiny", "https:"] {
            assert_eq!(path_alias(name), None, "{name}");
        }
    }
}
