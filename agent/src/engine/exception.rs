//! Finds the exception that stopped an engine among what it printed. vLLM's processes fail one after another, and the last lines
//! only say that an earlier one did.

/// The first exception in these lines that is not about another process's: its name and message, without the process and place before it.
pub(super) fn root_cause(lines: &[String]) -> Option<&str> {
    lines.iter().map(|line| message(line)).find(|message| is_exception(message) && !message.contains("See root cause above"))
}

/// A line without vLLM's prefix `(Process pid=1) ERROR 01-31 12:00:00 [file.py:1] `.
fn message(line: &str) -> &str {
    let after_process = line.strip_prefix('(').and_then(|rest| rest.split_once(") ")).map_or(line, |(_, rest)| rest);
    let after_place = after_process.split_once(".py:").and_then(|(_, rest)| rest.split_once("] ")).map_or(after_process, |(_, rest)| rest);
    after_place.trim_end()
}

/// `ValueError: …`, `torch.OutOfMemoryError: …`: at the beginning of the line, as Python ends a traceback.
fn is_exception(message: &str) -> bool {
    message.split_once(": ").is_some_and(|(name, text)| {
        let is_name = name.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_'));
        is_name && !text.is_empty() && ["Error", "Exception"].iter().any(|ending| name.ends_with(ending))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<String> {
        root_cause(&text.lines().map(str::to_owned).collect::<Vec<_>>()).map(str::to_owned)
    }

    #[test]
    fn the_exception_of_the_first_process_is_the_cause_and_not_what_the_others_say_of_it() {
        let printed = "\
(APIServer pid=1) WARNING 11-21 05:02:22 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many open files`.
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953] ValueError: Available memory on node 0 is too small
(EngineCore pid=2) ERROR 11-21 05:02:51 [core.py:1510] Exception: WorkerProc initialization failed
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}";
        assert_eq!(found(printed).as_deref(), Some("ValueError: Available memory on node 0 is too small"));
    }

    #[test]
    fn plain_tracebacks_and_dotted_names_are_read_too() {
        assert_eq!(
            found("Traceback\n  File \"x\"\ntorch.OutOfMemoryError: CUDA out of memory.\n").as_deref(),
            Some("torch.OutOfMemoryError: CUDA out of memory.")
        );
    }

    #[test]
    fn an_engine_that_was_killed_has_no_exception() {
        assert_eq!(found("INFO: Application startup complete.\nError: \nsome Error: in words"), None);
    }
}
