/// A small test harness: `TEST(name_that_says_the_promise) { CHECK(...); }`.
///
/// A failing check prints file, line and test, and the test goes on. A test that throws fails. A
/// test that hangs is ended by an alarm and fails the run, since a broken ordering rule may show as
/// a deadlock.
#pragma once

#include <functional>
#include <string>

namespace harness {

using TestFunction = void (*)();

struct Registration {
    Registration(const char* name, TestFunction function);
};

/// Thread-safe.
void report_failure(const char* file, int line, const std::string& message);

/// Tells why the running test checks nothing here; printed, and counted on the closing line.
void skip(const std::string& reason);

/// Failed checks of this process so far.
int failures();

/// Runs `body` in a forked child, which exits with the number of checks that failed in it.
/// Returns the status of `waitpid`.
int run_in_child(const std::function<void()>& body);

/// Whether a child ended by itself and without a failed check.
bool child_passed(int status);

template <typename Expected, typename Function>
void check_throws(const char* file, int line, const char* text, Function function) {
    try {
        function();
    } catch (const Expected&) {
        return;
    } catch (const std::exception& other) {
        report_failure(file, line, std::string(text) + " threw another type: " + other.what());
        return;
    }
    report_failure(file, line, std::string(text) + " did not throw");
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace harness

#define TEST(name)                                                       \
    static void name();                                                  \
    static const ::harness::Registration name##_registered(#name, name); \
    static void name()

#define CHECK(condition)                                               \
    do {                                                               \
        if (!(condition)) {                                            \
            ::harness::report_failure(__FILE__, __LINE__, #condition); \
        }                                                              \
    } while (false)

#define CHECK_THROWS(type, expression)                                                     \
    ::harness::check_throws<type>(__FILE__, __LINE__, #expression " [expected " #type "]", \
                                  [&] { static_cast<void>(expression); })
