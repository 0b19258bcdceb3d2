/// The disk tier's threads: transfers between memory and its file, in pieces.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disk_file.h"
#include "process.h"

namespace offload {

/// Told how a transfer ended; the error is empty when it went well.
using TransferDone = std::function<void(const std::string& error)>;

enum class TransferKind { kWrite, kRead };

/// One transfer that was submitted. The caller keeps the memory valid until it ends; the queue
/// keeps `owner` alive as long.
class Transfer {
   public:
    Transfer(TransferKind kind, std::shared_ptr<const void> owner, std::size_t offset, void* memory,
             std::size_t bytes, TransferDone done);

    /// True when no byte had moved, and none will: the memory is the caller's again and `done` is
    /// not called but destroyed here. Never blocks. Any thread; throws `EngineUnusable` in a forked
    /// child.
    bool try_cancel();

   private:
    friend class TransferQueue;

    enum class State { kWaiting, kBegun, kCancelled };

    const TransferKind kind_;
    const std::size_t offset_;
    unsigned char* const memory_;
    const std::size_t bytes_;
    const OwnerProcess owner_process_;
    std::atomic<State> state_{State::kWaiting};

    // Belong to who moves the state away from kWaiting.
    std::shared_ptr<const void> owner_;
    TransferDone done_;

    // Guarded by the queue's mutex.
    std::size_t next_ = 0;  // the first byte of which no piece was handed out
    int pieces_in_flight_ = 0;
    std::string error_;
};

struct TransferStatistics {
    std::uint64_t written_bytes = 0;  ///< whole blocks, of pieces that went well
    std::uint64_t read_bytes = 0;
    double write_ms = 0;  ///< time during which at least one piece was being written
    double read_ms = 0;
    std::uint64_t failed_transfers = 0;
    std::size_t queued_transfers = 0;  ///< of which nothing has begun
};

/// Two worker threads take pieces of the oldest transfer, so both work on one large tensor. Reads
/// go before writes, also between the pieces of a write: somebody waits for a read. Thread-safe.
///
/// `done` runs once, on a worker, without a lock, after the last piece and after the queue has
/// given up `owner`; it may submit. It must not throw: what it throws is dropped. After a failed
/// piece no further one of that transfer begins.
class TransferQueue {
   public:
    static constexpr int kWorkers = 2;

    TransferQueue(DiskFile& file, std::size_t piece_bytes);
    ~TransferQueue();
    TransferQueue(const TransferQueue&) = delete;
    TransferQueue& operator=(const TransferQueue&) = delete;

    /// Throws `EngineUnusable` once closing, except for what `done` submits.
    void submit(std::shared_ptr<Transfer> transfer);

    /// Waits until nothing is queued or in flight. Not on a worker.
    void drain();

    /// Drains, also what `done` submits meanwhile, and joins. Not on a worker.
    void close();

    /// Whether the calling thread may submit: always before `close`, a `done` also while it drains.
    bool accepts_caller();

    TransferStatistics statistics();

   private:
    using Clock = std::chrono::steady_clock;
    using Lock = std::unique_lock<std::mutex>;

    struct Piece {
        std::shared_ptr<Transfer> transfer;
        std::size_t begin;
        std::size_t bytes;
    };

    /// Time during which at least one of several overlapping intervals is open.
    struct BusyTime {
        int open = 0;
        Clock::time_point since;
        Clock::duration closed{};

        void begin();
        void end();
        double ms() const;
    };

    bool on_worker() const;
    void run();
    void work_on(Lock& lock, const Piece& piece);
    std::string move_piece(const Piece& piece);
    void complete(Lock& lock, Transfer& transfer);

    bool take_piece(Piece* piece);  // these require mutex_
    std::deque<std::shared_ptr<Transfer>>* next_queue();
    void finish_piece(const Piece& piece, std::string error);
    BusyTime& busy(TransferKind kind) {
        return kind == TransferKind::kWrite ? write_time_ : read_time_;
    }
    bool idle() const { return reads_.empty() && writes_.empty() && active_workers_ == 0; }

    DiskFile& file_;
    const std::size_t piece_bytes_;
    std::mutex closing_mutex_;  // taken before mutex_: one thread joins, later ones wait for it
    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable idle_;
    std::deque<std::shared_ptr<Transfer>> reads_;
    std::deque<std::shared_ptr<Transfer>> writes_;
    int active_workers_ = 0;
    bool closing_ = false;
    BusyTime write_time_;
    BusyTime read_time_;
    TransferStatistics statistics_;
    std::vector<std::thread> workers_;
};

}  // namespace offload
