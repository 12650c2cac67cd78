use super::*;

fn found(text: &str) -> Option<String> {
    FinalLines::from_lines(&text.lines().map(str::to_owned).collect::<Vec<_>>(), false).exception().map(str::to_owned)
}

#[test]
fn the_exception_of_the_first_failed_process_is_the_cause() {
    let printed = "\
(APIServer pid=1) WARNING 11-21 05:02:22 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many open files`.
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=3) ERROR 11-21 05:02:49 [multiproc_executor.py:953] ValueError: Available memory on node 0 is too small
(EngineCore pid=2) ERROR 11-21 05:02:51 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-21 05:02:51 [core.py:1510] Exception: WorkerProc initialization failed
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}";
    assert_eq!(found(printed).as_deref(), Some("ValueError: Available memory on node 0 is too small"));
}

#[test]
fn plain_tracebacks_and_dotted_exception_names_are_read_too() {
    assert_eq!(
        found("Traceback (most recent call last):\n  File \"x\"\ntorch.OutOfMemoryError: CUDA out of memory.\n").as_deref(),
        Some("torch.OutOfMemoryError: CUDA out of memory.")
    );
}

#[test]
fn an_exception_caught_and_logged_is_not_the_cause() {
    let printed = "\
(APIServer pid=1) ERROR 11-21 19:09:41 [registry.py:1041] Traceback (most recent call last):
(APIServer pid=1) ERROR 11-21 19:09:41 [registry.py:1041] OSError: [Errno 28] No space left on device
(APIServer pid=1) INFO 11-21 19:09:41 [model.py:733] Resolved architecture: Qwen2ForCausalLM
(EngineCore pid=2) ERROR 11-21 05:02:51 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-21 05:02:51 [core.py:1510] ValueError: No available memory for the cache blocks.";
    assert_eq!(found(printed).as_deref(), Some("ValueError: No available memory for the cache blocks."));
}

#[test]
fn the_last_of_chained_exceptions_is_the_cause() {
    let printed = "\
Traceback (most recent call last):
httpx.HTTPStatusError: Client error '401 Unauthorized'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
OSError: You are trying to access a gated repo.";
    assert_eq!(found(printed).as_deref(), Some("OSError: You are trying to access a gated repo."));
}

#[test]
fn a_killed_engine_has_no_exception() {
    assert_eq!(found("INFO: Application startup complete.\nError: \nsome Error: in words"), None);
}

#[test]
fn an_old_exception_of_a_request_is_not_the_cause() {
    let mut printed = "(APIServer pid=1) ERROR 11-21 19:09:41 [serving.py:1] ValueError: a request was wrong\n".to_owned();
    for number in 0..100 {
        printed.push_str(&format!("(APIServer pid=1) INFO 11-21 19:10:00 [loggers.py:1] Engine 000: {number}\n"));
    }
    assert_eq!(found(&printed), None);
}
