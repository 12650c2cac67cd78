//! The parts of an engine that is spread over several nodes: what each of them gets beside the
//! arguments that all have.
//!
//! vLLM does so without Ray since 0.12: the head serves, and the others are `--headless`.

use std::ffi::OsString;
use std::net::IpAddr;

use super::command_line::CommandLine;

/// vLLM's own limit for one step, in seconds. Hostler's watchdog is earlier, and its limit for a
/// first request that compiles is later than vLLM's default of 300.
const STEP_TIMEOUT_SECONDS: &str = "7200";

const STEP_TIMEOUT_VARIABLE: &str = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS";

/// Variables that name the interface on which Gloo and NCCL meet.
const INTERFACE_VARIABLES: [&str; 2] = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];

/// Where the parts of one epoch meet, for one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MeetingPoint {
    /// Address of the head.
    pub(crate) head: IpAddr,
    pub(crate) port: u16,
    /// Address of this node, and the interface that has it.
    pub(crate) own: IpAddr,
    pub(crate) interface: Option<String>,
    pub(crate) nodes: u32,
    /// Number of this node.
    pub(crate) number: u32,
}

impl MeetingPoint {
    /// The command line of this node's part. `is_set` says which variables the user has set.
    pub(crate) fn complete(&self, line: &CommandLine, is_set: impl Fn(&str) -> bool) -> CommandLine {
        let mut arguments = line.arguments.clone();
        let mut add = |flag: &str, value: String| arguments.extend([OsString::from(flag), OsString::from(value)]);
        add("--nnodes", self.nodes.to_string());
        add("--node-rank", self.number.to_string());
        add("--master-addr", self.head.to_string());
        add("--master-port", self.port.to_string());
        let mut set = line.set.clone();
        set.push(("VLLM_HOST_IP", self.own.to_string().into()));
        if let Some(interface) = &self.interface {
            set.extend(INTERFACE_VARIABLES.iter().filter(|name| !is_set(name)).map(|name| (*name, OsString::from(interface))));
        }
        if !is_set(STEP_TIMEOUT_VARIABLE) {
            set.push((STEP_TIMEOUT_VARIABLE, STEP_TIMEOUT_SECONDS.into()));
        }
        CommandLine { arguments, set, ..line.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> CommandLine {
        CommandLine {
            container: Vec::new(),
            program: "vllm".into(),
            arguments: vec!["serve".into()],
            set: Vec::new(),
            unset: Vec::new(),
            withheld_routes: &[],
        }
    }

    fn point() -> MeetingPoint {
        let own = "10.0.0.2".parse().unwrap();
        MeetingPoint { head: "10.0.0.1".parse().unwrap(), port: 29_501, own, interface: Some("hsn0".into()), nodes: 2, number: 1 }
    }

    #[test]
    fn each_part_learns_where_the_head_is_and_who_it_is() {
        let part = point().complete(&line(), |_| false);
        let words: Vec<_> = part.arguments.iter().map(|word| word.to_str().unwrap()).collect();
        let flags = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29501"];
        assert_eq!(words, [&["serve"], &flags[..]].concat());
        let value = |name: &str| part.set.iter().find(|(set, _)| *set == name).map(|(_, value)| value.to_str().unwrap());
        assert_eq!(value("VLLM_HOST_IP"), Some("10.0.0.2"));
        assert_eq!(value("NCCL_SOCKET_IFNAME"), Some("hsn0"));
        assert_eq!(value("GLOO_SOCKET_IFNAME"), Some("hsn0"));
        assert_eq!(value(STEP_TIMEOUT_VARIABLE), Some(STEP_TIMEOUT_SECONDS));
    }

    #[test]
    fn variables_of_the_user_are_left_alone() {
        let part = point().complete(&line(), |name| name == "NCCL_SOCKET_IFNAME" || name == STEP_TIMEOUT_VARIABLE);
        let names: Vec<_> = part.set.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"]);
    }
}
