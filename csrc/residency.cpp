#include "residency.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace offload {
namespace {

constexpr std::size_t kMaxReserveBytes = std::size_t{512} << 20;
constexpr std::size_t kWriteAheadBytes = std::size_t{64} << 20;  // keeps both disk threads busy
constexpr std::size_t kReadAheadBytes = std::size_t{256} << 20;  // under way at once

}  // namespace

Resident::Resident(std::shared_ptr<Slot> slot, std::shared_ptr<Copy> offload_copy)
    : bytes_(slot->bytes()), offload_copy_(std::move(offload_copy)), slot_(std::move(slot)) {}

Residency::Residency(Arena& arena) : arena_(arena) {}

Residency::~Residency() = default;

void Residency::set_disk(std::unique_ptr<DiskTier> disk) {
    std::shared_ptr<DiskTier> former;
    {
        Lock lock(mutex_);
        OFFLOAD_CHECK(disk_ == nullptr || disk_->statistics().live_extents == 0,
                      "set_disk: expected no ticket on the disk while it is changed, got some. End "
                      "the step that uses them first.");
        former = std::exchange(disk_, std::move(disk));
        statistics_.write_refusal.clear();
        write_refused_ = false;
    }
    if (former != nullptr) {
        former->close();
    }
}

void Residency::retry_writes() {
    Lock lock(mutex_);
    write_refused_ = false;
}

bool Residency::has_disk() {
    Lock lock(mutex_);
    return disk_ != nullptr;
}

void Residency::add(const std::shared_ptr<Resident>& resident, bool leaves) {
    Lock lock(mutex_);
    if (disk_ == nullptr) {
        return;
    }
    if (in_arena_.size() + on_disk_.size() >= sweep_at_) {
        sweep();
    }
    resident->order_ = next_order_++;
    in_arena_.emplace(resident->order_, resident);
    resident->leaves_ = leaves;
    if (leaves) {
        leaving_.push_back(resident);
    }
}

void Residency::put_last(const std::shared_ptr<Resident>& resident) {
    Lock lock(mutex_);
    if (resident->order_ == 0) {
        return;
    }
    Order& order = resident->slot_ == nullptr ? on_disk_ : in_arena_;
    order.erase(resident->order_);
    resident->order_ = next_order_++;
    order.emplace(resident->order_, resident);
}

void Residency::sweep() {
    for (Order* order : {&in_arena_, &on_disk_}) {
        for (auto entry = order->begin(); entry != order->end();) {
            entry = entry->second.expired() ? order->erase(entry) : std::next(entry);
        }
    }
    sweep_at_ = std::max<std::size_t>(256, 2 * (in_arena_.size() + on_disk_.size()));
}

Residency::Room Residency::make_room(std::size_t bytes) {
    Lock lock(mutex_);
    if (evict_first()) {
        return Room::kMade;
    }
    if (disk_ != nullptr) {
        write_first(bytes + kWriteAheadBytes);
    }
    return transfers_ > 0 ? Room::kComing : Room::kNone;
}

void Residency::wait_for_room() {
    Lock lock(mutex_);
    const std::uint64_t seen = transfers_ended_;
    changed_.wait(lock, [&] { return transfers_ended_ != seen || transfers_ == 0; });
}

bool Residency::evict_first() {
    for (auto entry = in_arena_.begin(); entry != in_arena_.end();) {
        const auto resident = entry->second.lock();
        if (resident == nullptr) {
            entry = in_arena_.erase(entry);
            continue;
        }
        // Another owner is a copy in flight or a view: the slot would not go free.
        if (resident->extent_ != nullptr && !resident->writing_ &&
            resident->slot_.use_count() == 1) {
            resident->slot_.reset();
            on_disk_.emplace(resident->order_, resident);
            in_arena_.erase(entry);
            ++statistics_.evicted_tickets;
            return true;
        }
        ++entry;
    }
    return false;
}

void Residency::write_first(std::size_t bytes_ahead) {
    for (const auto& [order, weak] : in_arena_) {
        if (writing_bytes_ >= bytes_ahead) {
            return;
        }
        const auto resident = weak.lock();
        if (resident != nullptr && resident->extent_ == nullptr && !resident->writing_ &&
            resident->offload_copy_->done() && resident->offload_copy_->error().empty() &&
            !begin_write(resident)) {
            return;
        }
    }
}

void Residency::write_behind() {
    Lock lock(mutex_);
    if (disk_ == nullptr || write_refused_) {
        return;
    }
    write_leaving();
    const std::size_t cap = arena_.cap_bytes();
    const std::size_t reserve = std::min(cap / 4, kMaxReserveBytes);
    const std::size_t free = cap - std::min(cap, arena_.live_bytes());
    std::size_t ready = free;  // what an allocation would get without waiting, or nearly so
    for (auto entry = in_arena_.begin(); entry != in_arena_.end() && ready < reserve; ++entry) {
        const auto resident = entry->second.lock();
        if (resident == nullptr) {
            continue;
        }
        if (resident->extent_ == nullptr && !resident->writing_) {
            if (!resident->offload_copy_->done()) {
                return;
            }
            if (!resident->offload_copy_->error().empty()) {
                continue;
            }
            if (!begin_write(resident)) {
                return;
            }
        }
        ready += resident->bytes_;
    }
}

void Residency::write_leaving() {
    while (!leaving_.empty()) {
        const auto resident = leaving_.front().lock();
        if (resident != nullptr) {
            if (!resident->offload_copy_->done()) {
                return;
            }
            const bool waits = resident->extent_ == nullptr && !resident->writing_ &&
                               resident->offload_copy_->error().empty();
            if (waits && !begin_write(resident)) {
                return;
            }
        }
        leaving_.pop_front();
    }
}

bool Residency::begin_write(const std::shared_ptr<Resident>& resident) {
    if (write_refused_) {
        return false;
    }
    std::shared_ptr<Extent> extent;
    try {
        extent = disk_->allocate(resident->bytes_);
        resident->writing_ = true;
        writing_bytes_ += resident->bytes_;
        ++transfers_;
        // The resident keeps its slot while it is written.
        disk_->write(extent, resident->slot_->data(),
                     [this, resident, extent](const std::string& error) {
                         on_written(resident, extent, error);
                     });
        return true;
    } catch (const std::exception& exception) {
        statistics_.write_refusal = exception.what();
        write_refused_ = true;
        if (resident->writing_) {
            resident->writing_ = false;
            writing_bytes_ -= resident->bytes_;
            --transfers_;
        }
        return false;
    }
}

void Residency::on_written(const std::shared_ptr<Resident>& resident,
                           const std::shared_ptr<Extent>& extent, const std::string& error) {
    Lock lock(mutex_);
    resident->writing_ = false;
    writing_bytes_ -= resident->bytes_;
    statistics_.write_refusal = error;
    write_refused_ = !error.empty();
    if (error.empty()) {
        ++statistics_.spilled_tickets;
        resident->extent_ = extent;
        if (resident->leaves_ && resident->slot_.use_count() == 1) {
            resident->slot_.reset();
            in_arena_.erase(resident->order_);
            on_disk_.emplace(resident->order_, resident);
        }
    }
    end_transfer();
}

std::shared_ptr<Slot> Residency::slot_of(const Resident& resident) {
    Lock lock(mutex_);
    return resident.slot_;
}

bool Residency::fetch(const std::shared_ptr<Resident>& resident, std::shared_ptr<Slot> spare,
                      Resident::Ready ready) {
    std::shared_ptr<Slot> slot;
    {
        Lock lock(mutex_);
        slot = resident->slot_;
        if (slot == nullptr) {
            if (resident->incoming_ == nullptr) {
                if (spare == nullptr) {
                    return false;
                }
                begin_read(resident, std::move(spare));
            }
            resident->waiting_.push_back(std::move(ready));
            return true;
        }
    }
    ready(slot, "");
    return true;
}

void Residency::read_ahead(const Resident& resident) {
    Lock lock(mutex_);
    if (disk_ == nullptr || resident.order_ == 0) {
        return;
    }
    auto entry = on_disk_.lower_bound(resident.order_);
    while (entry != on_disk_.begin() && reading_bytes_ < kReadAheadBytes) {
        --entry;
        const auto before = entry->second.lock();
        if (before == nullptr || before->incoming_ != nullptr) {
            continue;
        }
        auto slot = arena_.try_allocate(before->bytes_);
        if (slot == nullptr) {
            return;
        }
        begin_read(before, std::move(slot));
    }
}

void Residency::begin_read(const std::shared_ptr<Resident>& resident, std::shared_ptr<Slot> slot) {
    unsigned char* const data = slot->data();
    resident->incoming_ = std::move(slot);
    reading_bytes_ += resident->bytes_;
    ++transfers_;
    try {
        disk_->read(resident->extent_, data,
                    [this, resident](const std::string& error) { on_read(resident, error); });
    } catch (...) {
        resident->incoming_.reset();
        reading_bytes_ -= resident->bytes_;
        --transfers_;
        throw;
    }
}

void Residency::on_read(const std::shared_ptr<Resident>& resident, const std::string& error) {
    std::vector<Resident::Ready> waiting;
    std::shared_ptr<Slot> slot;
    {
        Lock lock(mutex_);
        slot = std::move(resident->incoming_);
        resident->incoming_.reset();
        reading_bytes_ -= resident->bytes_;
        waiting.swap(resident->waiting_);
        if (error.empty()) {
            ++statistics_.fetched_tickets;
            resident->slot_ = slot;
            on_disk_.erase(resident->order_);
            in_arena_.emplace(resident->order_, resident);
        } else {
            slot.reset();
        }
        if (waiting.empty()) {
            slot.reset();  // before others are told, so that they can give it up
        }
    }
    for (const Resident::Ready& ready : waiting) {
        ready(slot, error);
    }
    slot.reset();
    Lock lock(mutex_);
    end_transfer();
}

void Residency::end_transfer() {
    --transfers_;
    ++transfers_ended_;
    changed_.notify_all();
}

const char* Residency::tier_of(const Resident& resident) {
    Lock lock(mutex_);
    return resident.slot_ == nullptr ? "disk" : "host";
}

void Residency::drain() {
    std::shared_ptr<DiskTier> disk;
    {
        Lock lock(mutex_);
        changed_.wait(lock, [this] { return transfers_ == 0; });
        disk = disk_;
    }
    if (disk != nullptr) {
        disk->drain();  // callbacks end a little after they have told us
    }
}

bool Residency::idle() {
    Lock lock(mutex_);
    return transfers_ == 0;
}

void Residency::close() {
    drain();
    std::shared_ptr<DiskTier> disk;
    {
        Lock lock(mutex_);
        disk = disk_;
    }
    if (disk != nullptr) {
        disk->close();  // waits for callbacks, which may want the lock
    }
}

ResidencyStatistics Residency::statistics() {
    Lock lock(mutex_);
    return statistics_;
}

DiskStatistics Residency::disk_statistics() {
    Lock lock(mutex_);
    return disk_ == nullptr ? DiskStatistics{} : disk_->statistics();
}

}  // namespace offload
