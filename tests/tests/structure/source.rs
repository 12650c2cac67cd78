//! Production source of the workspace's crates, parsed: modules, the types that they define, their
//! imports and mentions.
//!
//! Tests (`#[cfg(test)]`) are left out, and code that macros generate is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// Crates that users run, and their parts. The folder is the crate's name.
const CRATES: [&str; 16] = [
    "agent",
    "batch",
    "bench",
    "boot",
    "cli",
    "cluster",
    "controller",
    "http1",
    "placement",
    "prompt",
    "proto",
    "router",
    "scheduler",
    "sim",
    "simulate",
    "tls",
];

pub(crate) struct Crate {
    pub(crate) name: String,
    /// Modules by path from the crate's root, which is the empty path.
    pub(crate) modules: BTreeMap<Vec<String>, Module>,
}

#[derive(Default)]
pub(crate) struct Module {
    pub(crate) path: Vec<String>,
    pub(crate) file: PathBuf,
    /// Names of the structs, enums, traits and aliases that the module defines.
    pub(crate) types: Vec<String>,
    /// Paths as they are written, without those of `use`.
    pub(crate) paths: BTreeSet<Vec<String>>,
    /// Bindings of `use`: the name here, and the path as it is written.
    pub(crate) bindings: BTreeMap<String, Vec<String>>,
    /// Dropped tasks: `tokio::spawn(…);` and `let _ = tokio::spawn(…);`.
    pub(crate) dropped_tasks: Vec<String>,
    pub(crate) has_arc_dyn: bool,
    /// Name and level of each line of the log with `event = "…"`.
    pub(crate) events: BTreeSet<(String, String)>,
}

impl Module {
    /// Whether the module contains a path beginning with `prefix`.
    pub(crate) fn mentions(&self, prefix: &[&str]) -> bool {
        self.paths
            .iter()
            .chain(self.bindings.values())
            .any(|path| path.len() >= prefix.len() && path.iter().zip(prefix).all(|(name, expected)| name == expected))
    }
}

/// All crates of [`CRATES`].
pub(crate) fn production_crates() -> Vec<Crate> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    CRATES.iter().map(|name| read_crate(&root, name)).collect()
}

fn read_crate(root: &Path, name: &str) -> Crate {
    let mut modules = BTreeMap::new();
    read_module(root, &PathBuf::from(name).join("src/lib.rs"), Vec::new(), &mut modules);
    Crate { name: name.to_owned(), modules }
}

/// Reads a file and the files of the modules that it declares.
fn read_module(root: &Path, file: &Path, path: Vec<String>, modules: &mut BTreeMap<Vec<String>, Module>) {
    let text = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("cannot parse {}: {error}", file.display()));
    let mut reader =
        Reader { module: Module { path: path.clone(), file: file.to_owned(), ..Module::default() }, children: Vec::new(), depth: 0 };
    reader.visit_file(&parsed);
    let folder = match file.file_name().and_then(|name| name.to_str()) {
        Some("lib.rs" | "mod.rs") => file.with_file_name(""),
        _ => file.with_extension(""),
    };
    for child in reader.children {
        let (flat, nested) = (folder.join(format!("{child}.rs")), folder.join(&child).join("mod.rs"));
        let file = if root.join(&flat).exists() { flat } else { nested };
        read_module(root, &file, [path.clone(), vec![child]].concat(), modules);
    }
    modules.insert(path, reader.module);
}

struct Reader {
    module: Module,
    /// Modules in separate files.
    children: Vec<String>,
    /// Number of functions around the visited item; types defined in them are private to them.
    depth: usize,
}

impl Reader {
    fn add_path(&mut self, names: Vec<String>) {
        self.module.paths.insert(names);
    }

    fn add_use(&mut self, tree: &syn::UseTree, mut path: Vec<String>) {
        match tree {
            syn::UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.add_use(&step.tree, path);
            }
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_use(tree, path.clone())),
            syn::UseTree::Glob(_) => self.add_path(path),
            syn::UseTree::Name(name) if name.ident == "self" => self.bind(path.last().cloned().unwrap_or_default(), path),
            syn::UseTree::Name(name) => {
                path.push(name.ident.to_string());
                self.bind(name.ident.to_string(), path);
            }
            syn::UseTree::Rename(renamed) => {
                if renamed.ident != "self" {
                    path.push(renamed.ident.to_string());
                }
                match renamed.rename.to_string().as_str() {
                    "_" => self.add_path(path),
                    name => self.bind(name.to_owned(), path),
                }
            }
        }
    }

    fn bind(&mut self, name: String, path: Vec<String>) {
        // Types and functions may share a name, or an import may be within a function: both paths
        // count.
        if let Some(other) = self.module.bindings.insert(name, path) {
            self.add_path(other);
        }
    }

    /// Reads the tokens of macros' arguments: paths in them are names joined by `::`.
    ///
    /// Macros in them are read as well.
    fn read_tokens(&mut self, of_macro: &str, tokens: TokenStream) {
        self.add_events(of_macro, tokens.clone());
        let mut inner_macro = String::new();
        let mut names: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Punct(punct) if punct.as_char() == '!' => inner_macro = names.last().cloned().unwrap_or_default(),
                TokenTree::Ident(ident) => {
                    if colons != 2 && !names.is_empty() {
                        self.add_path(std::mem::take(&mut names));
                    }
                    names.push(ident.to_string());
                    colons = 0;
                }
                other => {
                    if !names.is_empty() {
                        self.add_path(std::mem::take(&mut names));
                    }
                    colons = 0;
                    let called = std::mem::take(&mut inner_macro);
                    if let TokenTree::Group(group) = other {
                        self.read_tokens(&called, group.stream());
                    }
                }
            }
        }
        if !names.is_empty() {
            self.add_path(names);
        }
    }

    /// Finds `event = "name"` among the arguments of a macro of `tracing`, whose name is the level.
    fn add_events(&mut self, level: &str, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for three in tokens.windows(3) {
            if let [TokenTree::Ident(field), TokenTree::Punct(equals), TokenTree::Literal(value)] = three
                && field == "event"
                && equals.as_char() == '='
            {
                self.module.events.insert((value.to_string().trim_matches('"').to_owned(), level.to_owned()));
            }
        }
        // Find fields with that name whose value is a variable's: collectors would get the value as
        // a name.
        for (place, two) in tokens.windows(2).enumerate() {
            let follows_equals = place > 0 && matches!(&tokens[place - 1], TokenTree::Punct(before) if before.as_char() == '=');
            if let [TokenTree::Punct(sign), TokenTree::Ident(field)] = two
                && field == "event"
                && !follows_equals
                && ['?', '%'].contains(&sign.as_char())
                && ["error", "warn", "info", "debug", "trace"].contains(&level)
            {
                self.module.events.insert((format!("{}event", sign.as_char()), level.to_owned()));
            }
        }
    }

    fn add_type(&mut self, ident: &syn::Ident) {
        if self.depth == 0 {
            self.module.types.push(ident.to_string());
        }
    }

    fn note_dropped_task(&mut self, expression: &syn::Expr) {
        if let syn::Expr::Call(call) = expression
            && let syn::Expr::Path(function) = &*call.func
            && names_of(&function.path) == ["tokio", "spawn"]
        {
            let file = self.module.file.display();
            self.module.dropped_tasks.push(format!("{file}"));
        }
    }
}

fn names_of(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg") && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test")))
    })
}

impl<'a> Visit<'a> for Reader {
    fn visit_item(&mut self, item: &'a syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Enum(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        match item.content {
            Some(_) => visit::visit_item_mod(self, item),
            None => self.children.push(item.ident.to_string()),
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.add_use(&item.tree, Vec::new());
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add_type(&item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add_type(&item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add_type(&item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add_type(&item.ident);
        visit::visit_item_type(self, item);
    }

    fn visit_block(&mut self, block: &'a syn::Block) {
        self.depth += 1;
        visit::visit_block(self, block);
        self.depth -= 1;
    }

    fn visit_stmt(&mut self, statement: &'a syn::Stmt) {
        match statement {
            syn::Stmt::Expr(expression, Some(_)) => self.note_dropped_task(expression),
            syn::Stmt::Local(local) if matches!(local.pat, syn::Pat::Wild(_)) => {
                if let Some(init) = &local.init {
                    self.note_dropped_task(&init.expr);
                }
            }
            _ => {}
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.add_path(names_of(path));
        if path.segments.last().is_some_and(|last| last.ident == "Arc" && holds_trait_object(&last.arguments)) {
            self.module.has_arc_dyn = true;
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'a syn::Macro) {
        let name = call.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default();
        self.read_tokens(&name, call.tokens.clone());
        visit::visit_macro(self, call);
    }
}

fn holds_trait_object(arguments: &syn::PathArguments) -> bool {
    let syn::PathArguments::AngleBracketed(arguments) = arguments else { return false };
    arguments.args.iter().any(|argument| matches!(argument, syn::GenericArgument::Type(syn::Type::TraitObject(_))))
}
