//! Which aliases count, where several models of the fleet would have the same name. Pure; the
//! fleet's writer asks.

use std::collections::{BTreeMap, BTreeSet};

use super::replica_status::Model;

/// The aliases that something else has too: another model as its own name, or another path as its
/// last part. A request by such a name could mean either, so no alias counts.
pub(super) fn contested_aliases(models: &[&Model]) -> BTreeSet<String> {
    let mut paths: BTreeMap<&str, &str> = BTreeMap::new();
    let mut contested = BTreeSet::new();
    for (alias, path) in models.iter().filter_map(|model| Some((&model.id, model.alias_of.as_deref()?))) {
        if *paths.entry(alias).or_insert(path) != path {
            contested.insert(alias.clone());
        }
    }
    if !paths.is_empty() {
        let has_same_name = |model: &&&Model| model.alias_of.is_none() && paths.contains_key(&*model.id);
        contested.extend(models.iter().filter(has_same_name).map(|model| model.id.clone()));
    }
    contested
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contested(models: &[(&str, &str)]) -> Vec<String> {
        let model = |(id, path): &(&str, &str)| Model {
            alias_of: (!path.is_empty()).then(|| (*path).to_owned()),
            ..Model::new((*id).to_owned(), "{}".into())
        };
        let models: Vec<Model> = models.iter().map(model).collect();
        contested_aliases(&models.iter().collect::<Vec<_>>()).into_iter().collect()
    }

    #[test]
    fn an_alias_is_contested_once_anything_else_has_its_name() {
        let (path, alias) = (("/a/tiny", ""), ("tiny", "/a/tiny"));
        assert_eq!(contested(&[path, alias, path, alias]), [""; 0], "two replicas of one model");
        assert_eq!(contested(&[path, alias, ("tiny", "/b/tiny")]), ["tiny"]);
        assert_eq!(contested(&[("tiny", ""), path, alias]), ["tiny"], "of a user's own name");
        assert_eq!(contested(&[path, alias, ("other", ""), ("large", "/b/large")]), [""; 0]);
        assert_eq!(contested(&[("tiny", ""), ("tiny", "")]), [""; 0], "which is no alias");
    }
}
