//! Knowledge about vLLM: its releases and their features, its flags and front-ends, the command
//! line and the directory of an engine.
//!
//! This knowledge rots with each release, so it is in one place. The decisions based on it are in
//! `plan`, `engine` and `keeper`.

pub(crate) mod arguments;
pub mod command_line;
pub(crate) mod directory;
pub(crate) mod flag;
pub(crate) mod front_end;
pub(crate) mod parsers;
pub(crate) mod parts;
pub(crate) mod plugin;
pub(crate) mod releases;
pub(crate) mod traces;
pub mod version;
pub(crate) mod warm_start;

pub use command_line::{CommandLine, LaunchContext};
pub use flag::{FlagChoice, FlagOrigin};
pub use front_end::FrontEndInUse;
pub(crate) use parts::MeetingPoint;
pub use traces::EngineTraces;
pub use version::VllmVersion;
