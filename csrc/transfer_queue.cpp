#include "transfer_queue.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace offload {
namespace {

thread_local const TransferQueue* worker_of = nullptr;

std::size_t whole_blocks(std::size_t bytes) {
    return (bytes + DiskFile::kAlignment - 1) / DiskFile::kAlignment * DiskFile::kAlignment;
}

}  // namespace

Transfer::Transfer(TransferKind kind, std::shared_ptr<const void> owner, std::size_t offset,
                   void* memory, std::size_t bytes, TransferDone done)
    : kind_(kind),
      offset_(offset),
      memory_(static_cast<unsigned char*>(memory)),
      bytes_(whole_blocks(bytes)),
      owner_(std::move(owner)),
      done_(std::move(done)) {}

bool Transfer::try_cancel() {
    owner_process_.check("try_cancel");
    State expected = State::kWaiting;
    if (!state_.compare_exchange_strong(expected, State::kCancelled)) {
        return false;
    }
    done_ = nullptr;
    owner_.reset();
    return true;
}

void TransferQueue::BusyTime::begin() {
    if (open++ == 0) {
        since = Clock::now();
    }
}

void TransferQueue::BusyTime::end() {
    if (--open == 0) {
        closed += Clock::now() - since;
    }
}

double TransferQueue::BusyTime::ms() const {
    const Clock::duration running = open > 0 ? Clock::now() - since : Clock::duration{};
    return std::chrono::duration<double, std::milli>(closed + running).count();
}

TransferQueue::TransferQueue(DiskFile& file, std::size_t piece_bytes)
    : file_(file), piece_bytes_(piece_bytes) {
    OFFLOAD_CHECK(piece_bytes > 0 && piece_bytes % DiskFile::kAlignment == 0,
                  "DiskTier: expected pieces of a multiple of ", DiskFile::kAlignment,
                  " bytes, got ", piece_bytes);
    try {
        for (int i = 0; i < kWorkers; ++i) {
            workers_.emplace_back([this] { run(); });
        }
    } catch (...) {
        close();  // a thread that started must be joined
        throw;
    }
}

TransferQueue::~TransferQueue() { close(); }

void TransferQueue::submit(std::shared_ptr<Transfer> transfer) {
    Lock lock(mutex_);
    if (closing_ && !on_worker()) {
        throw EngineUnusable("submit: expected a running disk tier, got one that was closed.");
    }
    auto& queue = transfer->kind_ == TransferKind::kRead ? reads_ : writes_;
    queue.push_back(std::move(transfer));
    work_.notify_all();
}

void TransferQueue::drain() {
    OFFLOAD_CHECK(!on_worker(), "drain: expected a thread that is not the disk tier's own");
    Lock lock(mutex_);
    idle_.wait(lock, [this] { return idle(); });
}

void TransferQueue::close() {
    OFFLOAD_CHECK(!on_worker(), "close: expected a thread that is not the disk tier's own");
    std::lock_guard<std::mutex> closing(closing_mutex_);
    {
        Lock lock(mutex_);
        closing_ = true;
        work_.notify_all();
    }
    for (std::thread& worker : workers_) {
        worker.join();
    }
    workers_.clear();
}

bool TransferQueue::accepts_caller() {
    Lock lock(mutex_);
    return !closing_ || on_worker();
}

bool TransferQueue::on_worker() const { return worker_of == this; }

TransferStatistics TransferQueue::statistics() {
    Lock lock(mutex_);
    TransferStatistics statistics = statistics_;
    statistics.write_ms = write_time_.ms();
    statistics.read_ms = read_time_.ms();
    for (const auto* queue : {&reads_, &writes_}) {
        statistics.queued_transfers += static_cast<std::size_t>(
            std::count_if(queue->begin(), queue->end(), [](const auto& transfer) {
                return transfer->state_.load() == Transfer::State::kWaiting;
            }));
    }
    return statistics;
}

void TransferQueue::run() {
    worker_of = this;
    Lock lock(mutex_);
    while (true) {
        Piece piece;
        if (take_piece(&piece)) {
            work_on(lock, piece);
            continue;
        }
        if (idle()) {
            idle_.notify_all();
        }
        if (closing_) {
            return;  // what a callback still submits is taken by the worker that runs it
        }
        work_.wait(lock);
    }
}

bool TransferQueue::take_piece(Piece* piece) {
    while (auto* const queue = next_queue()) {
        const std::shared_ptr<Transfer>& front = queue->front();
        Transfer& transfer = *front;
        auto expected = Transfer::State::kWaiting;
        transfer.state_.compare_exchange_strong(expected, Transfer::State::kBegun);
        if (expected == Transfer::State::kCancelled || transfer.next_ == transfer.bytes_) {
            queue->pop_front();
            continue;
        }
        piece->transfer = front;
        piece->begin = transfer.next_;
        piece->bytes = std::min(piece_bytes_, transfer.bytes_ - transfer.next_);
        transfer.next_ += piece->bytes;
        ++transfer.pieces_in_flight_;
        if (transfer.next_ == transfer.bytes_) {
            queue->pop_front();
        }
        return true;
    }
    return false;
}

std::deque<std::shared_ptr<Transfer>>* TransferQueue::next_queue() {
    if (!reads_.empty()) {
        return &reads_;
    }
    return writes_.empty() ? nullptr : &writes_;
}

void TransferQueue::work_on(Lock& lock, const Piece& piece) {
    Transfer& transfer = *piece.transfer;
    ++active_workers_;
    busy(transfer.kind_).begin();
    lock.unlock();
    std::string error = move_piece(piece);
    lock.lock();
    busy(transfer.kind_).end();
    finish_piece(piece, std::move(error));
    if (transfer.pieces_in_flight_ == 0 && transfer.next_ == transfer.bytes_) {
        complete(lock, transfer);
    }
    --active_workers_;
}

std::string TransferQueue::move_piece(const Piece& piece) {
    const Transfer& transfer = *piece.transfer;
    unsigned char* const memory = transfer.memory_ + piece.begin;
    try {
        if (transfer.kind_ == TransferKind::kWrite) {
            file_.write(transfer.offset_ + piece.begin, memory, piece.bytes);
        } else {
            file_.read(transfer.offset_ + piece.begin, memory, piece.bytes);
        }
    } catch (const std::exception& exception) {
        return exception.what();
    }
    return {};
}

void TransferQueue::finish_piece(const Piece& piece, std::string error) {
    Transfer& transfer = *piece.transfer;
    --transfer.pieces_in_flight_;
    if (error.empty()) {
        (transfer.kind_ == TransferKind::kWrite ? statistics_.written_bytes
                                                : statistics_.read_bytes) += piece.bytes;
    } else if (transfer.error_.empty()) {
        transfer.error_ = std::move(error);
        transfer.next_ = transfer.bytes_;
        ++statistics_.failed_transfers;
    }
}

void TransferQueue::complete(Lock& lock, Transfer& transfer) {
    TransferDone done = std::exchange(transfer.done_, nullptr);
    std::shared_ptr<const void> owner = std::move(transfer.owner_);
    lock.unlock();  // also what they own dies outside the lock
    owner.reset();
    try {
        done(transfer.error_);
    } catch (...) {
        // Its contract forbids it, and a worker has nobody to tell.
    }
    done = nullptr;
    lock.lock();
}

}  // namespace offload
