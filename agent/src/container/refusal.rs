//! What a container's runtime says when it starts no container, and what to do about it.
//!
//! The phrases were read in the sources of Apptainer 1.4 and 1.5; those of a missing image or
//! program, and of missing capabilities, were seen with 1.4.5.

/// How the runtime's last words begin: those of its command, and of its starter, which is in C.
///
/// vLLM has no colon there.
const BEGINNINGS: [&str; 2] = ["FATAL:", "ERROR  :"];

/// Errors of one start.
const MAX_WORDS: usize = 8;

const ANOTHER: &str = "run `hostler doctor` on that host, and show the site's support the runtime's words";

/// Remedy for each phrase, in this order: the first may be the cause of the later ones.
const REMEDIES: [(&[&str], &str); 6] = [
    (&["capability set"], "root has fewer rights here than the runtime asks for: run the agent as another user, or set APPTAINER_USERNS=1"),
    (
        &["user namespace", "unprivileged_userns", "setgroups", "uid_map", "starter-suid"],
        "this host lets users make no containers: ask the site's support for user namespaces, or for Apptainer with its setuid helper",
    ),
    (
        &["squashfuse", "fuse", "FUSE", "superblock", "squashfs"],
        "this host cannot mount image files: unpack it once with `apptainer build --sandbox FOLDER IMAGE`, and name the folder with --image",
    ),
    (&["open image"], "look for the image on that host: it has to be on a file system that all nodes see, and readable for you"),
    (&["executable file not found"], "the image has no such program in its PATH: name its path in the image with --vllm-bin"),
    (
        &["no space left", "session"],
        "a folder for the runtime's own mounts is full or missing: `df -h` shows which, and APPTAINER_TMPDIR moves it",
    ),
];

/// Why there is no container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The runtime's own words.
    pub(crate) cause: String,
    pub(crate) remedy: &'static str,
}

/// Finds the runtime's last words in a program's output.
pub(crate) fn find<'a>(lines: impl DoubleEndedIterator<Item = &'a str>) -> Option<Refusal> {
    let words =
        |line: &'a str| BEGINNINGS.iter().find_map(|beginning| plain(line).strip_prefix(beginning)).map(|words| plain(words).trim_end());
    // The starter's words come before those of the command, which then say only that it failed.
    let said: Vec<&str> = lines.rev().filter_map(words).take(MAX_WORDS).collect();
    let last = said.first()?;
    let meant = said.iter().find_map(|words| Some((words, find_remedy(words)?)));
    let (cause, remedy) = meant.unwrap_or((last, ANOTHER));
    Some(Refusal { cause: (*cause).to_owned(), remedy })
}

fn find_remedy(words: &str) -> Option<&'static str> {
    REMEDIES.iter().find(|(phrases, _)| phrases.iter().any(|phrase| words.contains(phrase))).map(|(_, remedy)| *remedy)
}

/// Text without the blanks and the codes of colours before it.
fn plain(text: &str) -> &str {
    let text = text.trim_start();
    match text.strip_prefix("\u{1b}[").and_then(|codes| codes.split_once('m')) {
        Some((codes, rest)) if codes.bytes().all(|byte| byte.is_ascii_digit() || byte == b';') => plain(rest),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_of_apptainer_lead_to_a_remedy() {
        let table = [
            (
                "FATAL:   While checking container encryption: could not open image /nowhere.sif: failed to retrieve path for /nowhere.sif: lstat /nowhere.sif: no such file or directory",
                "While checking container encryption: could not open image",
                "look for the image",
            ),
            ("FATAL:   \"vllm\": executable file not found in $PATH", "\"vllm\": executable file not found", "--vllm-bin"),
            (
                "ERROR  : Failed to create user namespace: maximum number of user namespaces exceeded, check /proc/sys/user/max_user_namespaces\nFATAL:   while executing starter: exit status 1",
                "Failed to create user namespace",
                "ask the site's support for user namespaces",
            ),
            (
                "\u{1b}[31mFATAL:  \u{1b}[0m container creation failed: mount hook function failure: mount image-driver: squashfuse_ll exited with status 1",
                "container creation failed",
                "--sandbox",
            ),
            (
                "\u{1b}[91mERROR  : Requesting capability set 0x1ffffffffff while permitted capability set is 0x1fffeffffff\n\u{1b}[0m",
                "Requesting capability set",
                "APPTAINER_USERNS=1",
            ),
            ("FATAL:   something new", "something new", "hostler doctor"),
        ];
        for (output, cause, remedy) in table {
            let refusal = find(output.lines()).unwrap();
            assert!(refusal.cause.starts_with(cause) && refusal.remedy.contains(remedy), "{output}: {refusal:?}");
        }
    }

    #[test]
    fn an_engine_that_only_mentions_a_fatal_error_is_not_the_runtime() {
        assert_eq!(find("(EngineCore) FATAL: out of words\nERROR 11-29 00:27:31 [core.py:9] failed\nINFO: ready".lines()), None);
        assert_eq!(find("".lines()), None);
    }
}
