//! `hostler simulate`: compares ways to choose a replica on a model of engines. The simulator is a
//! crate of its own; this module connects it to the terminal.

use hostler_simulate::SimulateArgs;

use crate::output::say;

pub(crate) fn simulate(args: &SimulateArgs) -> anyhow::Result<()> {
    say(hostler_simulate::simulate(args)?.trim_end());
    Ok(())
}
