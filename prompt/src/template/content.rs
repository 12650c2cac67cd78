//! Shape of message that a chat template expects: content as one text, or as a list of parts.
//!
//! Engines decide it by looking for a loop over the content of a message in the template's syntax
//! tree, so this module asks the same question of the same tree.
//!
//! Scopes are ignored, as in engines: a name that stands for the messages in one place stands for
//! them everywhere.

use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Set, Stmt};
use minijinja::machinery::parse;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentShape {
    /// A single text; the texts of several parts are joined by line feeds.
    Text,
    Parts,
}

impl ContentShape {
    pub(super) fn of(source: &str) -> Result<Self, minijinja::Error> {
        let root = parse(source, "chat", Default::default())?;
        let mut tree = TemplateTree::default();
        tree.statement(&root, None);
        Ok(if tree.iterates_content().unwrap_or(false) { Self::Parts } else { Self::Text })
    }
}

/// Parts of a template that decide its content shape.
#[derive(Default)]
struct TemplateTree<'t, 's> {
    assignments: Vec<&'t Set<'s>>,
    /// Loops, each with the number of the macro around it.
    loops: Vec<(&'t ForLoop<'s>, Option<usize>)>,
    macros: Vec<&'t Macro<'s>>,
    calls: Vec<&'t Call<'s>>,
}

impl<'t, 's> TemplateTree<'t, 's> {
    /// Whether a loop iterates over content.
    ///
    /// `None` if the template assigns to something other than a plain name; engines then give up
    /// and pass texts.
    fn iterates_content(&self) -> Option<bool> {
        let messages = self.names_of_messages()?;
        let mut message_names = Vec::new();
        for (looped, _) in &self.loops {
            if messages.iter().any(|name| is_variable(&looped.iter, name)) {
                message_names.push(name_of(&looped.target)?);
            }
        }
        let is_content = |expression: &Expr<'s>| message_names.iter().any(|name| is_field(expression, name, "content"));
        let received: Vec<Vec<&str>> = self.macros.iter().map(|macro_| self.content_parameters(macro_, &is_content)).collect();
        for (looped, inside) in &self.loops {
            let over_parameter = inside.is_some_and(|number| received[number].iter().any(|name| is_name(&looped.iter, name)));
            let over_plain_name = inside.is_none() && is_name(&looped.iter, "content");
            if is_content(&looped.iter) || over_parameter || over_plain_name {
                name_of(&looped.target)?;
                return Some(true);
            }
        }
        Some(false)
    }

    /// `messages`, and every name that they or a part of them are assigned to.
    fn names_of_messages(&self) -> Option<Vec<&'s str>> {
        let mut names = vec!["messages"];
        let mut next = 0;
        while next < names.len() {
            for assignment in &self.assignments {
                if is_variable(&assignment.expr, names[next]) {
                    let name = name_of(&assignment.target)?;
                    if !names.contains(&name) {
                        names.push(name);
                    }
                }
            }
            next += 1;
        }
        Some(names)
    }

    /// Parameters of a macro that some call passes a message's content to.
    fn content_parameters(&self, macro_: &Macro<'s>, is_content: &impl Fn(&Expr<'s>) -> bool) -> Vec<&'s str> {
        let parameters: Vec<&'s str> = macro_.args.iter().filter_map(name_of).collect();
        let mut given = Vec::new();
        for call in self.calls.iter().filter(|call| is_name(&call.expr, macro_.name)) {
            for (position, argument) in call.args.iter().enumerate() {
                match argument {
                    CallArg::Pos(value) if is_content(value) => given.extend(parameters.get(position)),
                    CallArg::Kwarg(name, value) if is_content(value) => given.extend(parameters.iter().find(|known| *known == name)),
                    _ => {}
                }
            }
        }
        given
    }

    fn statements(&mut self, statements: &'t [Stmt<'s>], inside: Option<usize>) {
        for statement in statements {
            self.statement(statement, inside);
        }
    }

    fn statement(&mut self, statement: &'t Stmt<'s>, inside: Option<usize>) {
        match statement {
            Stmt::Template(template) => self.statements(&template.children, inside),
            Stmt::EmitExpr(emitted) => self.expression(&emitted.expr),
            Stmt::ForLoop(looped) => {
                self.loops.push((looped, inside));
                self.expression(&looped.iter);
                self.expressions(looped.filter_expr.as_ref());
                self.statements(&looped.body, inside);
                self.statements(&looped.else_body, inside);
            }
            Stmt::IfCond(condition) => {
                self.expression(&condition.expr);
                self.statements(&condition.true_body, inside);
                self.statements(&condition.false_body, inside);
            }
            Stmt::WithBlock(with) => {
                self.expressions(with.assignments.iter().map(|(_, value)| value));
                self.statements(&with.body, inside);
            }
            Stmt::Set(set) => {
                self.assignments.push(set);
                self.expression(&set.expr);
            }
            Stmt::SetBlock(set) => {
                self.expressions(set.filter.as_ref());
                self.statements(&set.body, inside);
            }
            Stmt::AutoEscape(block) => self.statements(&block.body, inside),
            Stmt::FilterBlock(block) => {
                self.expression(&block.filter);
                self.statements(&block.body, inside);
            }
            Stmt::Block(block) => self.statements(&block.body, inside),
            Stmt::Macro(macro_) => {
                self.macros.push(macro_);
                self.expressions(&macro_.defaults);
                self.statements(&macro_.body, Some(self.macros.len() - 1));
            }
            Stmt::CallBlock(block) => {
                self.call(&block.call);
                self.statements(&block.macro_decl.body, inside);
            }
            Stmt::Do(done) => self.call(&done.call),
            _ => {}
        }
    }

    fn expressions(&mut self, expressions: impl IntoIterator<Item = &'t Expr<'s>>) {
        for expression in expressions {
            self.expression(expression);
        }
    }

    fn expression(&mut self, expression: &'t Expr<'s>) {
        match expression {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                self.expressions([&slice.start, &slice.stop, &slice.step].into_iter().flatten());
            }
            Expr::UnaryOp(operation) => self.expression(&operation.expr),
            Expr::BinOp(operation) => self.expressions([&operation.left, &operation.right]),
            Expr::Compare(comparison) => {
                self.expression(&comparison.expr);
                self.expressions(comparison.ops.iter().map(|operation| &operation.expr));
            }
            Expr::IfExpr(condition) => {
                self.expressions([&condition.test_expr, &condition.true_expr]);
                self.expressions(condition.false_expr.as_ref());
            }
            Expr::Filter(filter) => {
                self.expressions(filter.expr.as_ref());
                self.arguments(&filter.args);
            }
            Expr::Test(test) => {
                self.expression(&test.expr);
                self.arguments(&test.args);
            }
            Expr::GetAttr(access) => self.expression(&access.expr),
            Expr::GetItem(access) => self.expressions([&access.expr, &access.subscript_expr]),
            Expr::Call(call) => self.call(call),
            Expr::List(list) => self.expressions(&list.items),
            Expr::Tuple(tuple) => self.expressions(&tuple.items),
            Expr::Map(map) => self.expressions(map.keys.iter().chain(&map.values)),
        }
    }

    fn call(&mut self, call: &'t Call<'s>) {
        self.calls.push(call);
        self.expression(&call.expr);
        self.arguments(&call.args);
    }

    fn arguments(&mut self, arguments: &'t [CallArg<'s>]) {
        for argument in arguments {
            match argument {
                CallArg::Pos(value) | CallArg::Kwarg(_, value) | CallArg::PosSplat(value) | CallArg::KwargSplat(value) => {
                    self.expression(value);
                }
            }
        }
    }
}

fn name_of<'s>(expression: &Expr<'s>) -> Option<&'s str> {
    match expression {
        Expr::Var(variable) => Some(variable.id),
        _ => None,
    }
}

fn is_name(expression: &Expr<'_>, name: &str) -> bool {
    name_of(expression) == Some(name)
}

/// Inner expression without filters, tests and slices: `messages[1:]|list` gives `messages`.
fn strip_filters<'t, 's>(mut expression: &'t Expr<'s>) -> &'t Expr<'s> {
    loop {
        expression = match expression {
            Expr::Filter(filter) => match &filter.expr {
                Some(inner) => inner,
                None => return expression,
            },
            Expr::Test(test) => &test.expr,
            Expr::Slice(slice) => &slice.expr,
            _ => return expression,
        };
    }
}

fn is_variable(expression: &Expr<'_>, name: &str) -> bool {
    is_name(strip_filters(expression), name)
}

fn is_field(expression: &Expr<'_>, variable: &str, field: &str) -> bool {
    match strip_filters(expression) {
        Expr::GetAttr(access) => is_name(&access.expr, variable) && access.name == field,
        Expr::GetItem(access) => {
            is_name(&access.expr, variable)
                && matches!(&access.subscript_expr, Expr::Const(constant) if constant.value.as_str() == Some(field))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
