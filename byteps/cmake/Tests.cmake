# Programs that try the worker and the server; BYTEPS_BUILD_TESTS asks for them.
add_library(worker_under_test STATIC ${WORKER_SOURCES} byteps/device/fake.cc)
target_compile_options(worker_under_test PRIVATE ${WARNINGS})
target_link_libraries(worker_under_test PUBLIC byteps_engine)

# Upstream's arrays, when they grow, copy nothing from nowhere: memcpy of 0 bytes from null.
set(ARRAYS_THAT_GROW)
if(BYTEPS_FUZZERS)
  set(ARRAYS_THAT_GROW -fno-sanitize=nonnull-attribute)
endif()

find_package(GTest)
if(GTest_FOUND)
  add_executable(unit_test
    tests/base/invariant_test.cc
    tests/base/launch_test.cc
    tests/base/log_output_test.cc
    tests/base/protocol_test.cc
    tests/base/stall_watch_test.cc
    tests/cluster/ps_message_test.cc
    tests/device/device_test.cc
    tests/engine/declarations_test.cc
    tests/engine/engine_gpu_test.cc
    tests/engine/engine_test.cc
    tests/engine/failure_test.cc
    tests/engine/plan_test.cc
    tests/engine/push_scheduler_test.cc
    tests/engine/remains_test.cc
    tests/engine/server_loss_test.cc
    tests/engine/streamed_sum_test.cc
    tests/net/link/admission_test.cc
    tests/net/link/dial_plan_test.cc
    tests/net/link/greeting_test.cc
    tests/net/link/idle_blocks_test.cc
    tests/net/link/link_test.cc
    tests/net/link/meta_codec_test.cc
    tests/net/link/nic_counters_test.cc
    tests/net/link/nic_pairs_test.cc
    tests/net/link/nics_test.cc
    tests/net/link/outage_watch_test.cc
    tests/net/link/peer_table_test.cc
    tests/net/link/receipts_test.cc
    tests/net/link/redial_test.cc
    tests/net/link/replay_log_test.cc
    tests/net/membership/neighbors_test.cc
    tests/net/membership/node_membership_test.cc
    tests/net/membership/parts_test.cc
    tests/net/membership/scheduler_membership_test.cc
    tests/net/membership/node_return_test.cc
    tests/net/membership/scheduler_return_test.cc
    tests/net/membership/scheduler_servers_test.cc
    tests/net/rdma/inbox_test.cc
    tests/net/rdma/outbox_test.cc
    tests/net/rdma/posted_sends_test.cc
    tests/net/sarray_test.cc
    tests/net/tcp/frame_reader_test.cc
    tests/net/tcp/greeter_test.cc
    tests/net/tcp/pending_peers_test.cc
    tests/net/tcp/pollers_test.cc
    tests/net/tcp/send_queue_test.cc
    tests/observe/http_server_test.cc
    tests/observe/status_test.cc
    tests/server/absent_test.cc
    tests/server/backup_link_test.cc
    tests/server/backup_test.cc
    tests/server/given_test.cc
    tests/server/accumulator_test.cc
    tests/server/feedback_test.cc
    tests/server/optimizer/differences_test.cc
    tests/server/optimizer/round_update_test.cc
    tests/server/optimizer/absent_steps_test.cc
    tests/server/optimizer/step_test.cc
    tests/server/server_test.cc
    tests/support/failing_memory.cc
    tests/support/fake_channel.cc)
  target_compile_options(unit_test PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(unit_test PRIVATE worker_under_test GTest::gtest_main)
  target_link_options(unit_test PRIVATE  # failing_memory.cc
    LINKER:--wrap=_Znwm,--wrap=_Znam,--wrap=_ZnamRKSt9nothrow_t)
  add_executable(connection_test
    tests/net/link/contract/contract_test.cc
    tests/net/rdma/rdma_pair.cc
    tests/net/tcp/connection/choice_test.cc
    tests/net/tcp/connection/greeting_test.cc
    tests/net/tcp/connection/link.cc
    tests/net/tcp/connection/nics_test.cc
    tests/net/tcp/connection/relay.cc
    tests/net/tcp/connection/sending_test.cc
    tests/net/tcp/connection/tcp_pair.cc)
  target_include_directories(connection_test PRIVATE tests/net/link/contract)
  target_compile_options(connection_test PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(connection_test PRIVATE byteps_net GTest::gtest_main)
  add_executable(tls_test tests/net/tls/tls_test.cc)
  target_compile_options(tls_test PRIVATE ${WARNINGS})
  target_link_libraries(tls_test PRIVATE byteps_net GTest::gtest_main)
endif()

add_executable(sum_worker tests/jobs/sum_worker.cc)
target_compile_options(sum_worker PRIVATE ${WARNINGS})
target_link_libraries(sum_worker PRIVATE worker_under_test)

add_executable(server_ring tests/jobs/server_ring.cc)
target_compile_options(server_ring PRIVATE ${WARNINGS})
target_link_libraries(server_ring PRIVATE byteps_engine)

# It plays threads and time itself, which no sanitizer follows.
if(NOT BYTEPS_SANITIZE)
  add_executable(simulate
    tests/simulation/device.cc  # in place of fake.cc
    tests/simulation/job.cc
    tests/simulation/network.cc
    tests/simulation/plan.cc
    tests/simulation/probes.cc
    tests/simulation/replica_job.cc
    tests/simulation/replica_member.cc
    tests/simulation/replica_optimizer.cc
    tests/simulation/simulate.cc
    tests/simulation/simulated_channel.cc
    tests/simulation/virtual_threads.cc
    tests/simulation/worker_script.cc)
  target_compile_options(simulate PRIVATE ${WARNINGS})
  target_link_libraries(simulate PRIVATE worker_under_test)
endif()

# What reads bytes that come from a network, one program for each parser (tests/fuzz).
if(BYTEPS_FUZZERS)
  add_custom_target(fuzzers)
  foreach(name backup declarations frame hello http membership meta rdma server)
    add_executable(${name}_fuzzer tests/fuzz/${name}_fuzzer.cc)
    target_compile_options(${name}_fuzzer PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
    target_link_options(${name}_fuzzer PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name}_fuzzer PRIVATE byteps_engine)
    add_dependencies(fuzzers ${name}_fuzzer)
  endforeach()
endif()
