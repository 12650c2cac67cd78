//! What the agent knows of vLLM: its releases and what each can do, its flags and front-ends, the command line and the directory of an engine. It rots with
//! each release, so it stands in one place; what is decided with it stands in `plan`, `engine` and `keeper`.

pub(crate) mod arguments;
pub mod command_line;
pub(crate) mod directory;
pub(crate) mod flag;
pub(crate) mod front_end;
pub(crate) mod plugin;
pub(crate) mod releases;
pub(crate) mod traces;
pub mod version;

pub use command_line::{CommandLine, LaunchContext};
pub use flag::{FlagChoice, FlagOrigin};
pub use front_end::FrontEndInUse;
pub use traces::EngineTraces;
pub use version::VllmVersion;
