#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "harness.h"

namespace harness {
namespace {

constexpr unsigned kHangSeconds = 120;

std::vector<std::pair<const char*, TestFunction>>& tests() {
    static std::vector<std::pair<const char*, TestFunction>> all;
    return all;
}

std::atomic<int> failed_checks{0};
std::atomic<const char*> running{""};
bool skipped = false;

/// For an alarm or a crash: names the test, with nothing but what a signal handler may call.
void on_signal(int signal_number) {
    const char* const name = running.load();
    const char* const what = signal_number == SIGALRM ? "\nHUNG: " : "\nCRASHED: ";
    ssize_t written = write(STDOUT_FILENO, what, std::strlen(what));
    written += write(STDOUT_FILENO, name, std::strlen(name));
    written += write(STDOUT_FILENO, "\n", 1);
    _exit(written > 0 ? 3 : 4);
}

void run_guarded(const std::function<void()>& body) {
    try {
        body();
    } catch (const std::exception& exception) {
        report_failure("(uncaught)", 0, exception.what());
    }
}

}  // namespace

Registration::Registration(const char* name, TestFunction function) {
    tests().emplace_back(name, function);
}

void report_failure(const char* file, int line, const std::string& message) {
    ++failed_checks;
    std::printf("%s:%d: in %s: %s\n", file, line, running.load(), message.c_str());
    std::fflush(stdout);
}

void skip(const std::string& reason) {
    skipped = true;
    std::printf("skipped %s: %s\n", running.load(), reason.c_str());
}

int failures() { return failed_checks.load(); }

int run_in_child(const std::function<void()>& body) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(kHangSeconds / 2);  // alarms are not inherited
        if (!kSanitized) {
            signal(SIGSEGV, SIG_DFL);  // a child may promise to die of it
        }
        failed_checks = 0;
        run_guarded(body);
        _exit(failed_checks.load());
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}

bool child_passed(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

}  // namespace harness

/// Runs the tests whose names contain the argument, or all.
int main(int count, char** arguments) {
    using namespace harness;
    const char* const wanted = count > 1 ? arguments[1] : "";
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // `on_signal` ends the process without a flush
    signal(SIGALRM, on_signal);
    if (!kSanitized) {  // else the sanitizer tells more
        signal(SIGSEGV, on_signal);
        signal(SIGABRT, on_signal);
    }
    int passed = 0;
    int failed = 0;
    int skips = 0;
    for (const auto& [name, function] : tests()) {
        if (std::strstr(name, wanted) == nullptr) {
            continue;
        }
        running = name;
        skipped = false;
        const int before = failures();
        alarm(kHangSeconds);
        run_guarded(function);
        alarm(0);
        if (failures() != before) {
            std::printf("FAILED %s\n", name);
            ++failed;
        } else if (skipped) {
            ++skips;
        } else {
            ++passed;
        }
    }
    if (skips > 0) {
        std::printf("%d skipped\n", skips);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || passed == 0 ? 1 : 0;
}
